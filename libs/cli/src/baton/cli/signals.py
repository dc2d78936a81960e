"""Ctrl-C and SIGTERM as events that a waiting loop looks at, instead of exceptions that come anywhere."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_events() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Two events: set by the first such signal, and by any later one. Main thread only; the earlier handlers come back at the end."""
    first, again = threading.Event(), threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        (again if first.is_set() else first).set()

    earlier = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield first, again
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
