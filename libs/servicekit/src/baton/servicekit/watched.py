"""A value that is read from files, and read again when they change."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from baton.servicekit.errors import ServicekitError
from baton.servicekit.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

#: How often files are looked at. A change counts when two looks in a row see the same: what is half written mostly differs.
PERIOD_S = 1.0

_Stamp = tuple[object, ...]


class Watched(Generic[T]):
    """`value` is always one that `read` returned: files that cannot be used leave the old one in force, which is logged and counted.

    `read` blocks and raises ServicekitError for files that cannot be used. counters: "reloaded", "reload_failed". Thread safe.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Reads at once. Raises what `read` raises: at the start there is no old value. `what`: for the log ("TLS files")."""
        self.what = what
        self.counters: Counter[str] = Counter()
        self.problem = ""
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._look()
        self._tried = self._seen
        self.value = read()

    def refresh(self) -> bool:
        """Looks at the files once; True when a new value was taken. Blocks for the reading of a few small files."""
        with self._lock:
            before, self._seen = self._seen, self._look()
            if self._seen == self._tried or self._seen != before:
                return False
            self._tried = self._seen
            try:
                self.value = self._read()
            except ServicekitError as error:
                self.counters["reload_failed"] += 1
                self.problem = str(error)
                log.error("files changed and cannot be used: the earlier ones stay in force", what=self.what, problem=self.problem)
                return False
            self.counters["reloaded"] += 1
            self.problem = ""
            log.info("files reloaded", what=self.what, files=[str(path) for path in self._paths])
            return True

    async def run(self, period_s: float = PERIOD_S) -> None:
        """The clock; until cancelled."""
        if not self._paths:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(period_s)
            await asyncio.to_thread(self.refresh)

    def _look(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> object:
    """Whatever changes when the file is written, replaced, or made readable; symbolic links are followed, as Kubernetes swaps them."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
