"""Loading told to a log, once a second at most."""

from __future__ import annotations

import time
from collections.abc import Callable


class ProgressLog:
    """A `weights.Progress` that says how far loading is: `say` gets a line at most every `interval_s`, and one when all is read."""

    def __init__(self, say: Callable[[str], None], interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._interval_s = interval_s
        self._clock = clock
        self._began = self._told = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done < total and now - self._told < self._interval_s:
            return
        self._told = now
        elapsed = max(now - self._began, 1e-9)
        self._say(f"weights: {done / 1e9:.2f} of {total / 1e9:.2f} GB in {elapsed:.1f} s, {done / 1e9 / elapsed:.2f} GB/s")
