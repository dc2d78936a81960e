"""A worker's service from ready to stopped: what prefill and decode do alike."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

from baton.engine.types import Role
from baton.servicekit import GrpcServer, Lifecycle, TlsSettings, get_logger
from baton.wire.v1 import fleet_pb2, inference_pb2_grpc, worker_pb2_grpc
from baton.workerkit.front import WorkerFront
from baton.workerkit.groups import EngineSettings
from baton.workerkit.host import EngineHost
from baton.workerkit.joining.joining import Joining
from baton.workerkit.joining.settings import JoinSettings
from baton.workerkit.prefix_ledger import PrefixLedger
from baton.workerkit.progress import ProgressWatch
from baton.workerkit.refusing import RefusingInference
from baton.workerkit.servicer import WorkerServicer

if TYPE_CHECKING:
    from baton.engine import Engine

log = get_logger(__name__)

#: How long rooms that were told to end, and pages that a peer may still touch, are waited for at the end.
ABORT_TIMEOUT_S = 5.0
#: How long reports of a failed engine get to leave before the process stops.
LAST_WORDS_S = 0.5


def add_services(server: GrpcServer, front: WorkerFront, role: Role, prefixes: PrefixLedger | None = None) -> None:
    """The Worker contract, and the public one that is refused here."""
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, WorkerServicer(front, prefixes), "baton.v1.Worker")
    refusing = RefusingInference(role, front.gateway_address)
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, refusing, "baton.v1.Inference")


def ledger_of(engine: Engine, host: EngineHost, settings: EngineSettings) -> PrefixLedger:
    """What gateways may be told of the engine's prefix cache."""
    return PrefixLedger((lambda watcher: host.between_steps(lambda: engine.watch_prefixes(watcher))) if settings.prefix_cache else None)


def engine_lost(life: Lifecycle) -> Callable[[BaseException], None]:
    """What a front does when its engine broke: the process ends with status 1 once the gateways have heard it."""

    def lost(error: BaseException) -> None:
        asyncio.get_running_loop().call_later(LAST_WORDS_S, life.fail, error)

    return lost


async def serve_until_stopped(
    life: Lifecycle,
    server: GrpcServer,
    front: WorkerFront,
    host: EngineHost,
    addresses: Mapping[str, str],
    *,
    stall_limit_s: float,
    join: JoinSettings,
    tls: TlsSettings,
    obstacle: Callable[[], str] = lambda: "",
) -> None:
    """Serves from now until `life` stops, then drains: no new rooms, open ones get `life.drain_timeout_s`, the rest is ended.

    `server` and `front` are started already. Health says NOT_SERVING while `obstacle` names one (ProgressWatch). The server is made known
    as `join` says while it serves and takes rooms. Returns when no room is open and no peer can touch our pages, or after waiting in vain for that.
    """
    progress = ProgressWatch(host, server.set_serving, stall_limit_s=stall_limit_s, obstacle=obstacle)
    watch = life.watch(asyncio.create_task(progress.run(), name="progress watch"))
    try:
        await server.set_serving(True)
        life.ready(addresses)
        async with _joined(life, front, Joining(join, _member(front, addresses), tls)):
            await life.stopped()
            await server.drain()
            front.drain()
    finally:
        watch.cancel()
    if not await front.wait_idle(life.drain_timeout_s):
        front.abort_all("drained", f"the server stops, and {life.drain_timeout_s:g} s (--drain-timeout-s) were not enough for this room")
        await front.wait_idle(ABORT_TIMEOUT_S)
    await _wait_quiet(host, ABORT_TIMEOUT_S)
    front.end_sessions()


def _member(front: WorkerFront, addresses: Mapping[str, str]) -> fleet_pb2.Member:
    info = front.describe()
    return fleet_pb2.Member(
        instance_id=info.instance_id, role=info.role, address=addresses["grpc"], model=info.fingerprint.model, version=info.version
    )


@contextlib.asynccontextmanager
async def _joined(life: Lifecycle, front: WorkerFront, joining: Joining) -> AsyncIterator[None]:
    """Known from entering until leaving, or until a gateway tells the worker to drain."""

    async def leave_when_drained() -> None:
        await front.wait_draining()
        await joining.leave()

    for task in joining.start():
        life.watch(task)
    drained = life.watch(asyncio.create_task(leave_when_drained(), name="leave when drained"))
    try:
        yield
    finally:
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)
        await joining.leave()


async def _wait_quiet(host: EngineHost, timeout_s: float) -> None:
    """Waits until the engine holds no page for anybody."""
    deadline = time.monotonic() + timeout_s
    while host.alive and host.stats.free_pages != host.stats.total_pages:
        if time.monotonic() > deadline:
            log.warning("ending with pages that are not free", free_pages=host.stats.free_pages, total_pages=host.stats.total_pages)
            return
        await asyncio.sleep(0.02)
