"""The task that answers one client, and until when it may."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: What a client gets to take what was already on its way to it when its room failed.
LAST_WORDS_S = 2.0


class ClientHandler:
    """The task that answers one client.

    When its room has failed, or its time is over, and it is still writing, the client takes nothing: the task is called off.
    """

    def __init__(self, deadline: float) -> None:
        """deadline: time.monotonic(), seconds; for taking the whole answer, which may be complete long before."""
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()) + LAST_WORDS_S, self._evict)
        self._reading: asyncio.TimerHandle | None = None
        self.evicted = False

    def room_failed(self) -> None:
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LAST_WORDS_S, self._evict)

    def watch(self, handed_at: Callable[[], float | None], limit_s: float, on_unread: Callable[[], None]) -> None:
        """Calls the task off when what it was handed last (time.monotonic(), seconds; None: it waits for more) is not written within `limit_s`."""
        since = handed_at()
        left_s = limit_s if since is None else since + limit_s - time.monotonic()
        if left_s <= 0:
            on_unread()
            self._evict()
            return
        self._reading = asyncio.get_running_loop().call_later(left_s, self.watch, handed_at, limit_s, on_unread)

    def _evict(self) -> None:
        if self._task is not None:
            self.evicted = True
            self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()
        if self._reading is not None:
            self._reading.cancel()
        if self.evicted and self._task is not None:
            self._task.uncancel()
