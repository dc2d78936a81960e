"""Whether a file of a model folder can be read, asked before anything opens it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def why_unreadable(file: Path) -> str | None:
    """What keeps `file` from being read as a regular file, in words that follow its name; None: nothing does.

    Never blocks: a pipe that nobody writes to would be waited for by whoever opens it.
    """
    try:
        mode = file.stat().st_mode
        if stat.S_ISDIR(mode):
            return "is a folder, not a file"
        if not stat.S_ISREG(mode):
            return "is not a regular file"
        os.close(os.open(file, os.O_RDONLY))
    except FileNotFoundError:
        return f"is a link to {os.readlink(file)}, which is not there" if file.is_symlink() else "not found"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None
