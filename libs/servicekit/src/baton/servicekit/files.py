"""Files that others read while a service writes them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path`, so that a reader sees the old text or the new, never half of it. Raises OSError."""
    temporary = _beside(path)
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def check_writable(path: Path) -> None:
    """Raises ValueError where `write_atomically` could not write, which is tried; what is at `path` stays as it is."""
    if path.is_dir():
        raise ValueError("this is a folder: name a file in it")
    try:
        temporary = _beside(path)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        folder, problem = str(path.parent), error.strerror or error
        raise ValueError(f"no file can be written in {folder!r}: {problem}; make that folder, let this user write there, or name another") from None


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
