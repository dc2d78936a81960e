"""The first import of every process of Baton: it answers signals before what takes seconds to import.

The kernel keeps from process 1 of a container every signal that it has no handler for: `docker stop` in its first second would be lost and end in
SIGKILL. This needs little of the standard library and nothing else. What comes while Python itself starts waits for it, because the images start
`env --block-signal=TERM,INT python ...`: the kernel keeps a blocked signal, handler or not.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

__all__ = ["answer_as_process_1", "answer_signals"]

_STOPS = (signal.SIGTERM, signal.SIGINT)


def answer_signals(name: str) -> None:
    """For a service: from now on SIGTERM and SIGINT end the process at once, with status 0 and a line on standard error, until
    `baton.servicekit.run` takes them over. Nothing is owed to anyone yet. Main thread only."""

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"baton-{name}: stopped before it was ready ({signal.Signals(number).name})\n".encode())
        os._exit(0)

    for number in _STOPS:
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def answer_as_process_1() -> None:
    """For a command: as process 1 of a container it ends at SIGTERM like any other process would, at once and with status 143. What it was to do is
    not done, so 0 would be a lie. SIGINT is Python's own. Main thread only."""

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
