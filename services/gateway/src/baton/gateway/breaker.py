"""When a server that keeps failing is left alone, and when it is tried again. Pure: the caller brings the clock, in seconds."""

from __future__ import annotations

import random
from collections.abc import Callable

#: Failures without a success between them.
THRESHOLD = 3
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class Breaker:
    """Closed; open after THRESHOLD failures in a row; then one request at a time finds out whether the server works again.

    Each pause is twice the last one, up to MAX_PAUSE_S, and jittered, so that several gateways do not try at once.
    """

    def __init__(self, jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.25)) -> None:
        self._jitter = jitter
        self._num_failures = 0
        self._pause_s = 0.0
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether the server has still to prove that it works."""
        return self._open_until is not None

    def allows(self, now: float) -> bool:
        """Whether a request may be sent there."""
        return self._open_until is None or now >= self._open_until

    def chosen(self, now: float) -> None:
        """A request goes there. If it is the one that finds out, no other follows before it has ended, or for another pause."""
        if self._open_until is not None and now >= self._open_until:
            self._probing = True
            self._open_until = now + self._pause_s

    def failed(self, now: float) -> bool:
        """True when this failure opens it, or keeps it open. What was sent before it opened changes nothing more."""
        self._num_failures += 1
        if self._num_failures < THRESHOLD or (self.is_open and not self._probing):
            return False
        self._probing = False
        self._pause_s = min(max(FIRST_PAUSE_S, self._pause_s * 2), MAX_PAUSE_S)
        self._open_until = now + self._pause_s * self._jitter()
        return True

    def succeeded(self) -> None:
        """Closes it."""
        self._num_failures = 0
        self._pause_s = 0.0
        self._open_until = None
        self._probing = False
