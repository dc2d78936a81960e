"""A file of secrets, one a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from baton.servicekit.errors import SecretFileError
from baton.servicekit.watched import Watched

T = TypeVar("T")


def watch_secrets(flag: str, path: Path, make: Callable[[Sequence[bytes]], T]) -> Watched[T]:
    """What `make` makes of the file's secrets (ValueError: it cannot), made anew when the file changes.

    flag: the setting that named the file, for messages. Raises SecretFileError.
    """

    def read() -> T:
        try:
            return make([line.encode() for _, line in read_lines(flag, path)])
        except ValueError as error:
            raise SecretFileError(f"{flag}={str(path)!r}: {error}") from error

    return Watched(f"secrets of {flag}", [path], read)


def read_lines(flag: str, path: Path) -> list[tuple[int, str]]:
    """(number, stripped text) of the lines that are neither empty nor comments (#). Raises SecretFileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SecretFileError(f"{flag}={str(path)!r}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise SecretFileError(f"{flag}={str(path)!r} is not UTF-8 text") from None  # the original would quote the secret's bytes
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]
