"""Compiles what answers are held to, off the event loop, and hands it back in the order in which it was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.engine.grammar import Grammar, GrammarError, Grammars, NoGrammarsError
from baton.engine.types import Failure
from baton.servicekit.deep_work import DeepWork

#: `ready` gets the grammar, or why there is none: a GrammarError is its client's mistake, a RuntimeError this server's trouble.
Ready = Callable[[Grammar | GrammarError | RuntimeError], None]

NUM_THREADS = 2


class GrammarDesk:
    """Lives on one event loop. What waits is bounded by the rooms that are open. After `close` nobody is called any more."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._work = DeepWork(NUM_THREADS, "grammars")
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

    async def _compile(self, text: str) -> None:
        try:
            made: Grammar | GrammarError | RuntimeError = await self._work.run(self._grammars.compile, text)
        except (GrammarError, RuntimeError) as error:
            made = error
        for ready in self._waiting.pop(text):
            ready(made)


def no_grammar(why: GrammarError | RuntimeError, origin: str) -> Failure:
    """What ends a room whose grammar there is none of. origin: this server's role, whose trouble a thread that cannot be started is."""
    if isinstance(why, NoGrammarsError):
        return Failure("INVALID_ARGUMENT", "client", "unsupported", str(why))
    if isinstance(why, GrammarError):
        return Failure("INVALID_ARGUMENT", "client", "grammar_invalid", f"the grammar cannot be compiled: {why}")
    return Failure("RESOURCE_EXHAUSTED", origin, "overloaded", f"no thread could be started to compile the grammar: {why}")
