"""How far the loading of a model is, once a second."""

from __future__ import annotations

import time

from baton.servicekit import get_logger

log = get_logger(__name__)


class LoadLog:
    """Called by the engine's reader with the bytes read and the bytes to read; logs at most once a period, and the end."""

    def __init__(self, period_s: float = 1.0) -> None:
        self._period_s = period_s
        self._started = self._said = time.monotonic()

    def __call__(self, num_bytes: int, wanted: int) -> None:
        now = time.monotonic()
        if now - self._said < self._period_s and num_bytes < wanted:
            return
        self._said = now
        rate = num_bytes / max(now - self._started, 1e-9)
        log.info("loading weights", gigabytes=round(num_bytes / 1e9, 3), of=round(wanted / 1e9, 3), gigabytes_per_s=round(rate / 1e9, 2))
