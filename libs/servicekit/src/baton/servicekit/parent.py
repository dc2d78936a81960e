"""Ends this process when another one (its launcher) is gone, even by kill -9 and even if our event loop hangs."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

_POLL_MS = 1000


class ParentWatch:
    """Watches `pid` from a thread of its own. When it is gone: SIGTERM to ourselves, and SIGKILL if we still live `grace_s` later.

    A process descriptor is used where the kernel has them, so that a reused process id cannot be mistaken for the parent.
    """

    def __init__(self, pid: int, grace_s: float) -> None:
        self._pid = pid
        self._grace_s = grace_s
        self._closed = threading.Event()
        self._descriptor = self._open(pid)
        self._thread = threading.Thread(target=self._run, name="parent-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching. Idempotent."""
        self._closed.set()
        self._thread.join()
        if self._descriptor is not None and self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = None

    @staticmethod
    def _open(pid: int) -> int | None:
        """A descriptor of `pid`; -1: it is already gone; None: the kernel has no process descriptors."""
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            return -1
        except OSError:
            return None

    def _gone(self) -> bool:
        if self._descriptor is None:
            time.sleep(_POLL_MS / 1000)
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                return True
            return False
        if self._descriptor < 0:
            return True
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(_POLL_MS))

    def _run(self) -> None:
        while not self._gone():
            if self._closed.is_set():
                return
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._closed.wait(self._grace_s):
            os.kill(os.getpid(), signal.SIGKILL)
