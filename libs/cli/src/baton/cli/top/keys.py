"""Keys of a terminal, one at a time, on the event loop."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator

UP, DOWN, ENTER, ESCAPE = "up", "down", "enter", "escape"
_NAMES = {b"\x1b[A": UP, b"\x1bOA": UP, b"k": UP, b"\x1b[B": DOWN, b"\x1bOB": DOWN, b"j": DOWN, b"\r": ENTER, b"\n": ENTER, b"\x1b": ESCAPE}


def named(data: bytes) -> str:
    """What was pressed: a name of above, or the character; empty for what has no meaning here."""
    return _NAMES.get(data) or (data.decode("ascii") if len(data) == 1 and data.isascii() and data.decode("ascii").isprintable() else "")


@contextlib.contextmanager
def pressed(on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_key` with each key's name. The terminal is as it was on leaving. Without a terminal as standard input there are no keys."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, lambda: on_key(named(os.read(descriptor, 16))))
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
