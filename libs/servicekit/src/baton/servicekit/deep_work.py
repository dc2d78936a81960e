"""Work that may recurse as deep as what a client sent: each piece on a thread of its own, with a stack to match, beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Of address space, of which what is touched is memory while the thread lives. llguidance takes up to 8 KiB for each step of a chain of rules or
#: references, and no rule is shorter than 8 bytes: 256 KiB of them take less than 300 MiB. On a thread's usual 8 MiB some 900 steps end the process.
STACK_BYTES = 512 * 1024 * 1024

#: The size is the process's for every thread that is started, until it is set back.
_starting = threading.Lock()


class DeepWork:
    """At most so many pieces at a time, the others wait in their order. Lives on one event loop. A process that ends waits for what runs."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._places = asyncio.Semaphore(num_threads)
        self._name = name

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """What the function returns or raises. Raises RuntimeError where no thread can be started. A caller that is cancelled leaves its place only
        when the function has returned."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def end(result: T | None, error: BaseException | None) -> None:
            self._places.release()
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, error = None, None
            try:
                result = function(*arguments)
            except BaseException as caught:  # raised where it is awaited
                error = caught
            _tell(loop, end, result, error)

        try:
            _start(threading.Thread(target=work, name=self._name))
        except RuntimeError:
            self._places.release()
            raise
        return await done


def _start(thread: threading.Thread) -> None:
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)


def _tell(
    loop: asyncio.AbstractEventLoop, end: Callable[[T | None, BaseException | None], None], result: T | None, error: BaseException | None
) -> None:
    try:
        loop.call_soon_threadsafe(end, result, error)
    except RuntimeError:
        if not loop.is_closed():
            raise
