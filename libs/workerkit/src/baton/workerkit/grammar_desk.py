"""Compiles what answers are held to, off the event loop, and hands it back in the order in which it was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from baton.engine.grammar import Grammar, GrammarError, Grammars

#: `ready` gets the grammar, or why there is none.
Ready = Callable[[Grammar | GrammarError], None]

NUM_THREADS = 2


class GrammarDesk:
    """Lives on one event loop. Owns its threads; `close` ends them. What waits is bounded by the rooms that are open."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammars")
        self._waiting: dict[str, list[Ready]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, text: str, ready: Ready) -> None:
        """Calls `ready` on the event loop: now, where the grammar is kept. Those who ask for one text are called in their order: rooms that share a
        prompt have the same grammar, and the first of them must come first."""
        if (waiting := self._waiting.get(text)) is not None:
            waiting.append(ready)
        elif (known := self._grammars.known(text)) is not None:
            ready(known)
        else:
            self._waiting[text] = [ready]
            task = asyncio.get_running_loop().create_task(self._compile(text), name="compile a grammar")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, text: str) -> None:
        try:
            made: Grammar | GrammarError = await asyncio.get_running_loop().run_in_executor(self._threads, self._grammars.compile, text)
        except GrammarError as error:
            made = error
        for ready in self._waiting.pop(text):
            ready(made)
