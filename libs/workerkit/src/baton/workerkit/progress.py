"""Health that includes progress: an engine that has work and does none is not serving, however well the port answers; nor is a service that says it
lacks what it needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from baton.servicekit import get_logger
from baton.workerkit.host import EngineHost

log = get_logger(__name__)


class ProgressWatch:
    """Looks at the engine's pulse, and for an obstacle, on a clock of its own and tells `set_serving` when the verdict changes.

    obstacle: what keeps the service from serving besides its engine, in words; "": nothing.
    """

    def __init__(
        self,
        host: EngineHost,
        set_serving: Callable[[bool], Awaitable[None]],
        *,
        stall_limit_s: float,
        obstacle: Callable[[], str] = lambda: "",
    ) -> None:
        self._host = host
        self._set_serving = set_serving
        self._limit_s = stall_limit_s
        self._obstacle = obstacle
        self._period_s = min(1.0, stall_limit_s / 4)
        self._serving = True

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.check(time.monotonic())

    async def check(self, now: float) -> None:
        stalled_s = self._host.pulse.stalled_s(now)
        progresses = self._host.alive and stalled_s < self._limit_s
        obstacle = self._obstacle()
        serving = progresses and not obstacle
        if serving == self._serving:
            return
        self._serving = serving
        if serving:
            log.info("serving again")
        elif obstacle:
            log.error("not serving", problem=obstacle)
        else:
            log.error("engine makes no progress", stalled_s=round(stalled_s, 1), limit_s=self._limit_s, alive=self._host.alive)
        await self._set_serving(serving)
