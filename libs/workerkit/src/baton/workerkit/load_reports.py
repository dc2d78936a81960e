"""What a worker's gateways hear of its load: at once where that matters, else whenever it has changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from baton.wire.v1 import worker_pb2
from baton.workerkit.convert import load_to_wire
from baton.workerkit.host import EngineHost
from baton.workerkit.session import GatewaySession

LOAD_PERIOD_S = 1.0


class LoadReports:
    """`draining` goes with every report."""

    def __init__(self, host: EngineHost, num_rooms: Callable[[], int], sessions: Iterable[GatewaySession]) -> None:
        """sessions: whoever is attached now."""
        self.draining = False
        self._host = host
        self._num_rooms = num_rooms
        self._sessions = sessions
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Call on the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._report())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def now(self) -> worker_pb2.WorkerLoad:
        load = load_to_wire(self._host.stats, self._host.pulse.stalled_s(time.monotonic()))
        load.rooms = self._num_rooms()
        return load

    def send_to(self, session: GatewaySession) -> None:
        session.load(self.now(), self.draining)

    def send(self, *, force: bool = False) -> None:
        """To everybody whose last report said something else; to everybody with `force`."""
        load = self.now()
        for session in self._sessions:
            if force or session.last_load != load:
                session.load(load, self.draining)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(LOAD_PERIOD_S)
            self.send()
