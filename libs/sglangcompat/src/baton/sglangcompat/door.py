"""The port on which a server answers SGLang's scheduler contract, beside its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc

from baton.servicekit import GrpcServer, ListenSettings, join_address
from baton.servicekit.tls import Tls
from baton.sglangcompat.about import About
from baton.sglangcompat.leg import Leg, PlainLeg
from baton.sglangcompat.peering import Peering
from baton.sglangcompat.servicer import SchedulerServicer
from baton.wire.channel import SERVER_OPTIONS
from baton.workerkit import SglangSettings, WorkerFront

FULL_NAME = "sglang.grpc.scheduler.SglangScheduler"
#: What those who call while it closes get to hear why they are refused.
LAST_WORDS_S = 1.0


class Door:
    """Open from `open` to `close`. leg: how this server's half of a request finds the other; None: it does both halves."""

    def __init__(
        self,
        front: WorkerFront,
        leg: Leg | None,
        *,
        model_path: Path,
        listen: ListenSettings,
        settings: SglangSettings,
        tls: Tls,
        stall_limit_s: float,
        obstacle: Callable[[], str] = lambda: "",
    ) -> None:
        """Reads the model's configuration. stall_limit_s, obstacle: as ProgressWatch has them. Raises ModelFilesError."""
        self._listen = listen
        self._leg = leg or PlainLeg()
        self._server = GrpcServer(listen.host, settings.port or 0, tls=tls, options=SERVER_OPTIONS, port_flag="--sglang-port")
        problem = partial(_problem, front, stall_limit_s, obstacle)
        servicer = SchedulerServicer(front, self._leg, About(model_path), timeout_s=settings.timeout_s, problem=problem)
        self._server.add(sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server, servicer, FULL_NAME)
        self._hearing: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Listens; host:port for others. Raises AddressUnavailableError, TlsError."""
        if isinstance(self._leg, Peering):
            self._hearing = asyncio.create_task(self._leg.run(), name="peers of the SGLang port")
        port = await self._server.start()
        await self._server.set_serving(True)
        return join_address(self._listen.advertised_host(), port)

    async def close(self) -> None:
        """Ends what is still open. Idempotent."""
        await self._server.stop(LAST_WORDS_S)
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)


def _problem(front: WorkerFront, stall_limit_s: float, obstacle: Callable[[], str]) -> str:
    """Why no requests are to be sent here; "": they are."""
    if front.draining:
        return "draining"
    stalled_s = front.describe().load.stalled_s
    return f"the engine has made no progress for {stalled_s:.1f} s" if stalled_s >= stall_limit_s else obstacle()
