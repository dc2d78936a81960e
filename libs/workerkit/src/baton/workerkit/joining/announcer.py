"""What every way of making a worker known has in common."""

from __future__ import annotations

import random
from typing import Protocol

from baton.servicekit import get_logger

log = get_logger(__name__)

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0

#: For one answer.
CALL_TIMEOUT_S = 5.0


class Announcer(Protocol):
    """Makes this worker known in one place."""

    async def run(self) -> None:
        """Keeps it known until cancelled, through whatever happens there. Never returns."""

    async def leave(self) -> None:
        """Takes it back, after `run` was cancelled. Raises nothing: where it cannot be said, the lease ends by itself."""


class Retries:
    """Pauses between tries, doubled and jittered; a problem is logged when it is another than the last one."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._problem = ""
        self._pause_s = FIRST_PAUSE_S

    def failed(self, problem: str) -> float:
        """Seconds to wait."""
        if problem != self._problem:
            log.warning("not registered: trying on", where=self._where, problem=problem)
        self._problem = problem
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, MAX_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self._problem = ""
        self._pause_s = FIRST_PAUSE_S
