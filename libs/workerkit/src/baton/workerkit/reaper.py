"""Ends what stayed too long, on a clock of its own: one timer for the earliest limit of all rooms."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable


class Reaper:
    """`on_due(key)` is called on the event loop when a limit that `watch` was told is reached. Entries are not removed: `on_due` looks whether the
    limit still holds, and calls `watch` again if it moved."""

    def __init__(self, on_due: Callable[[int], None]) -> None:
        self._on_due = on_due
        self._heap: list[tuple[float, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def watch(self, key: int, due: float | None) -> None:
        """`due`: on time.monotonic(); None: never."""
        if due is None or self._closed:
            return
        heapq.heappush(self._heap, (due, key))
        if self._heap[0] == (due, key):
            self._arm()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._heap and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self._heap[0][0] - time.monotonic()), self._fire)

    def _fire(self) -> None:
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            self._on_due(heapq.heappop(self._heap)[1])
        self._arm()
