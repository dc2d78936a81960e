"""Standard output that may be full or gone: a line that explains it instead of a traceback. And one that cuts nothing."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console

from baton.cli.errors import OutputError, OutputGoneError

#: Of output that goes into a file or a pipe: nothing in it is ever cut.
WIDE = 10_000


def whole_console() -> Console:
    """As wide as the terminal, or as wide as anything."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


@contextmanager
def explained_output() -> Iterator[None]:
    """Inside, and for what is still buffered at its end, a write to standard output that fails raises OutputError."""
    plain = sys.stdout
    if plain is None:  # closed before the command began
        raise OutputError("standard output is closed: give the command one, as a file or /dev/null")
    sys.stdout = _Explained(plain)
    try:
        yield
    finally:
        sys.stdout = plain
        try:
            with _explained():
                plain.flush()
        except OutputError:
            _let_go(plain)
            raise


class _Explained:
    """A stream whose failures are OutputErrors; in everything else the one it stands for."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _explained():
            return self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        with _explained():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with _explained():
            self._stream.flush()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise OutputGoneError("the reader of standard output has gone") from error
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def _let_go(stream: TextIO) -> None:
    """What is left in its buffer goes nowhere: the interpreter writes it once more when it ends, and would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
