"""`baton-decode`: wires the engine, the transfer library, the sessions with prefill servers and the Worker contract."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # `python -m baton.decode.app` is `python -m baton.decode`: signals are answered before the imports below
    from baton.decode.__main__ import main as start

    sys.exit(start())

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from baton.decode.bootstrap_session import make_hello
from baton.decode.config import DecodeSettings, load_settings
from baton.decode.importer import Importer
from baton.decode.metrics import observe_importer
from baton.decode.peer import Doors
from baton.decode.peers import PeerSet
from baton.decode.sampling import DigestSampler
from baton.engine import EngineError, InvalidSettingError, ModelFolderError, Role
from baton.engine.grammar import Grammars
from baton.kvtransfer import AgentConfig, RankMemories, TransferError, digest, open_ranks
from baton.kvtransfer.identity import Identity
from baton.servicekit import (
    GrpcServer,
    Lifecycle,
    Metrics,
    SettingsError,
    StartError,
    TlsFiles,
    Tracing,
    configure_logs,
    configure_metrics,
    configure_tracing,
    get_logger,
    join_address,
    new_instance_id,
    run,
)
from baton.wire.channel import SERVER_OPTIONS
from baton.wire.v1 import common_pb2
from baton.workerkit import (
    Description,
    EngineHost,
    GpuMetrics,
    HostPageHash,
    Limits,
    PageHash,
    StepMetrics,
    WorkerFront,
    as_mapping,
    fingerprint_to_wire,
)
from baton.workerkit.joining.joining import registration_key
from baton.workerkit.serving import add_services, engine_lost, ledger_of, serve_until_stopped

if TYPE_CHECKING:
    from baton.engine import Engine, KVPool, Prepared
    from baton.engine.parallel.pool import ShardedPool
    from baton.sglangcompat import Door

log = get_logger(__name__)

#: Fences, inboxes and their ends may wait for a peer: each has a thread of its own up to this many, so that a dead one delays nobody else.
NUM_PEER_THREADS = 32
#: How long ended sessions may take to be fenced before the process ends.
FENCE_TIMEOUT_S = 5.0
#: Most that one inbox can have.
MAX_DOORBELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class _Model:
    """pool: on the GPU; None on a CPU, where pages lie in the transfer library's memory."""

    prepared: Prepared
    pool: KVPool | ShardedPool | None
    fingerprint: common_pb2.KVFingerprint


@dataclass(frozen=True, slots=True)
class _Receiver:
    """The decode role's half of the transfer: where pages land."""

    memories: RankMemories
    importer: Importer
    peers: PeerSet
    threads: ThreadPoolExecutor

    async def close(self) -> None:
        """After the engine has stopped."""
        await self.peers.close(FENCE_TIMEOUT_S)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.importer.close()
        self.threads.shutdown(wait=False)
        self.memories.close()


def main(argv: Sequence[str] | None = None) -> int:
    try:
        settings = load_settings(argv)
        instance_id = settings.listen.instance_id or new_instance_id(settings.role)
        configure_logs(settings.log, service="decode", instance_id=instance_id)
        tls = TlsFiles(settings.tls)
        registration_key(settings.join)  # a mistake in it is told now
        tracing = configure_tracing(settings.traces, service="decode", instance_id=instance_id)
        metrics = configure_metrics(settings.metrics, service="decode", instance_id=instance_id, role=settings.role)
    except SettingsError as error:
        print(f"baton-decode: {error}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        serve = partial(_serve, settings=settings, tls=tls, instance_id=instance_id, tracing=tracing, metrics=metrics)
        return run(serve, service="decode", instance_id=instance_id, listen=settings.listen)
    finally:
        tracing.shutdown()
        metrics.shutdown()


async def _serve(life: Lifecycle, *, settings: DecodeSettings, tls: TlsFiles, instance_id: str, tracing: Tracing, metrics: Metrics) -> None:
    receiver: _Receiver | None = None
    async with AsyncExitStack() as undo:
        try:
            loaded = await asyncio.to_thread(_load, settings)
            undo.push_async_callback(asyncio.to_thread, loaded.prepared.close)
            if settings.role == "decode":
                receiver = await _open_receiver(life, loaded, settings, instance_id, tls)
                undo.push_async_callback(receiver.close)
            engine = await asyncio.to_thread(_make_engine, loaded, receiver)
            undo.callback(engine.close)
        except (InvalidSettingError, ModelFolderError) as error:
            raise SettingsError(str(error)) from error  # starting again would not help
        except (EngineError, TransferError) as error:
            raise StartError(str(error)) from error
        await _serve_engine(life, engine, loaded, receiver, settings, instance_id, tracing, metrics, tls)


def _load(settings: DecodeSettings) -> _Model:
    """Blocks for seconds."""
    prepared = settings.engine.prepare(Role(settings.role), settings.prompt_budget())
    return _Model(prepared, prepared.device_pool(), fingerprint_to_wire(settings.engine.fingerprint(prepared)))


async def _open_receiver(life: Lifecycle, loaded: _Model, settings: DecodeSettings, instance_id: str, tls: TlsFiles) -> _Receiver:
    transfer = settings.transfer
    agent_config = AgentConfig(
        instance_id=instance_id,
        transport=transfer.transport,
        expected_transport=transfer.expected_transport,
        transfer_queues=transfer.transfer_queues,
        fingerprint=as_mapping(loaded.fingerprint),
    )
    layout = loaded.prepared.rank_layout
    addresses = None if loaded.pool is None else [part.address for part in loaded.pool.parts]
    memories = await asyncio.to_thread(open_ranks, agent_config, settings.engine.transfer_devices(), layout.pool_bytes, addresses)
    log.info("transfer library", description=memories.agents[0].description, ranks=len(memories.ranks))
    peers = PeerSet(linger_s=settings.peer_linger_s)
    page_hashes: Sequence[PageHash] = loaded.prepared.page_hashes(loaded.pool) or [
        HostPageHash(layout, partial(digest, region)) for region in memories.regions
    ]
    importer = Importer(
        layout, page_hashes, peers, DigestSampler(settings.digest), link_wait_s=settings.link_wait_s, revoke_timeout_s=settings.revoke_timeout_s
    )
    for agent in memories.agents:
        agent.on_doorbell(importer.doorbell)
    threads = ThreadPoolExecutor(NUM_PEER_THREADS, thread_name_prefix="prefill-peer")
    doors = Doors(
        ranks=memories.ranks,
        leases=importer,
        hello=make_hello(instance_id, loaded.fingerprint, layout.num_pages, page_hashes[0].name),
        here=Identity.decode(memories.agents[0].identity),
        tls=tls,
        # Each rank of a prefill server rings its own, and has one of our KV heads at least.
        num_doorbells=min(settings.engine.max_rooms * layout.num_kv_heads, MAX_DOORBELLS),
        threads=threads,
        fatal=life.fail,
        changed=peers.changed,
    )
    peers.open(doors)
    return _Receiver(memories, importer, peers, threads)


def _make_engine(loaded: _Model, receiver: _Receiver | None) -> Engine:
    from baton.engine import Engine

    prepared, pool = loaded.prepared, loaded.pool
    if receiver is None:
        engine = Engine(Role.PLAIN, prepared.model, prepared.config, pool=pool)
    else:
        pool = pool or prepared.host_pool([region.buffer for region in receiver.memories.regions])
        engine = Engine(Role.DECODE, prepared.model, prepared.config, pool=pool, importer=receiver.importer)
    engine.warm_up()
    return engine


async def _serve_engine(
    life: Lifecycle,
    engine: Engine,
    loaded: _Model,
    receiver: _Receiver | None,
    settings: DecodeSettings,
    instance_id: str,
    tracing: Tracing,
    metrics: Metrics,
    tls: TlsFiles,
) -> None:
    listen = settings.listen
    server = GrpcServer(listen.host, listen.port, tls=tls, options=SERVER_OPTIONS)
    host = EngineHost(engine, step_time=engine.step_time)
    StepMetrics(metrics).watch(engine)
    GpuMetrics(metrics, settings.engine.transfer_devices())
    clocks = [life.watch(asyncio.create_task(tls.run(), name="clock of TLS files"))]
    if receiver is not None:
        receiver.importer.on_wake(host.wake)
        observe_importer(metrics, receiver.importer, receiver.peers)
        clocks.append(life.watch(asyncio.create_task(receiver.peers.run(receiver.importer.tick), name="clock of leases")))
    front = WorkerFront(
        host,
        Limits(engine.role, loaded.prepared.model.config.vocab_size, engine.max_model_len, engine.layout.num_pages, engine.layout.page_size),
        Description(instance_id, loaded.fingerprint.model, version("baton-decode"), loaded.fingerprint),
        grammars=Grammars(settings.engine.model_path, loaded.prepared.model.config.vocab_size),
        max_rooms=settings.engine.max_rooms,
        tracer=tracing.tracer("baton.decode"),
        on_peers=receiver.peers.name if receiver is not None else None,
        on_lost=engine_lost(life),
        metrics=metrics,
    )
    if receiver is not None:
        receiver.peers.on_change(front.peers_changed)
    obstacle: Callable[[], str] = receiver.peers.obstacle if receiver is not None else lambda: ""
    add_services(server, front, engine.role, ledger_of(engine, host, settings.engine))
    door = _sglang_door(settings, front, obstacle, tls)
    front.start()
    try:
        await server.start()
        addresses = {"grpc": join_address(listen.advertised_host(), server.port)}
        addresses |= metrics.listen(settings.metrics, listen, tls.current_context)
        if door is not None:
            addresses["sglang"] = await door.open()
        await serve_until_stopped(
            life,
            server,
            front,
            host,
            addresses,
            stall_limit_s=settings.engine.stall_limit_s,
            join=settings.join,
            tls=settings.tls,
            obstacle=receiver.peers.obstacle if receiver is not None else lambda: "",
        )
    finally:
        for clock in clocks:
            clock.cancel()
        if door is not None:
            await door.close()
        await server.stop(1.0)
        await front.close()


def _sglang_door(settings: DecodeSettings, front: WorkerFront, obstacle: Callable[[], str], tls: TlsFiles) -> Door | None:
    """None without --sglang-port, and then nothing of it is imported. Raises StartError."""
    if settings.sglang.port is None:
        return None
    try:
        from baton.sglangcompat import Door, ModelFilesError, Peering
    except ModuleNotFoundError as error:
        raise StartError(f"--sglang-port needs {error.name}, which is not installed: pip install 'baton-decode[sglang]'") from error
    leg = Peering(front, timeout_s=settings.link_wait_s) if settings.role == "decode" else None
    try:
        return Door(
            front,
            leg,
            model_path=settings.engine.model_path,
            listen=settings.listen,
            settings=settings.sglang,
            tls=tls,
            stall_limit_s=settings.engine.stall_limit_s,
            obstacle=obstacle,
        )
    except ModelFilesError as error:
        raise StartError(str(error)) from error
