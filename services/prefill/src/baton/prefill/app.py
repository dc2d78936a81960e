"""`baton-prefill`: wires the engine, the transfer library, the bootstrap endpoint and the Worker contract."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # `python -m baton.prefill.app` is `python -m baton.prefill`: signals are answered before the imports below
    from baton.prefill.__main__ import main as start

    sys.exit(start())

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from baton.engine import EngineError, InvalidSettingError, KVLayout, ModelFolderError, Role
from baton.engine.grammar import Grammars
from baton.kvtransfer import AgentConfig, RankMemories, TransferError, digest, open_ranks
from baton.prefill.bootstrap import BootstrapServicer, Here
from baton.prefill.config import PrefillSettings, load_settings
from baton.prefill.exporter import Exporter
from baton.prefill.metrics import observe_exporter
from baton.prefill.ticket_gate import TicketGate
from baton.servicekit import (
    GrpcServer,
    Lifecycle,
    Metrics,
    SettingsError,
    StartError,
    TlsFiles,
    Tracing,
    Watched,
    configure_logs,
    configure_metrics,
    configure_tracing,
    get_logger,
    join_address,
    new_instance_id,
    run,
    watch_secrets,
)
from baton.wire.channel import SERVER_OPTIONS
from baton.wire.ticket import TicketKeys
from baton.wire.v1 import bootstrap_pb2_grpc, common_pb2
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
    from baton.engine import Engine
    from baton.sglangcompat import Door

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Machine:
    """What takes long to make, before anything is served."""

    memories: RankMemories
    rank_layout: KVLayout
    exporter: Exporter
    engine: Engine
    fingerprint: common_pb2.KVFingerprint
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Files:
    """What settings name and is read again when it changes."""

    tls: TlsFiles
    secrets: Watched[TicketKeys] | None

    @classmethod
    def read(cls, settings: PrefillSettings) -> _Files:
        """Before anything that takes long. Raises TlsError, SecretFileError."""
        registration_key(settings.join)
        path = settings.ticket_secret_file
        return cls(TlsFiles(settings.tls), None if path is None else watch_secrets("--ticket-secret-file", path, TicketKeys))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        settings = load_settings(argv)
        instance_id = settings.listen.instance_id or new_instance_id("prefill")
        configure_logs(settings.log, service="prefill", instance_id=instance_id)
        files = _Files.read(settings)
        tracing = configure_tracing(settings.traces, service="prefill", instance_id=instance_id)
        metrics = configure_metrics(settings.metrics, service="prefill", instance_id=instance_id)
    except SettingsError as error:
        print(f"baton-prefill: {error}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        serve = partial(_serve, settings=settings, files=files, instance_id=instance_id, tracing=tracing, metrics=metrics)
        return run(serve, service="prefill", instance_id=instance_id, listen=settings.listen)
    finally:
        tracing.shutdown()
        metrics.shutdown()


async def _serve(life: Lifecycle, *, settings: PrefillSettings, files: _Files, instance_id: str, tracing: Tracing, metrics: Metrics) -> None:
    undo = ExitStack()
    try:
        try:
            machine = await asyncio.to_thread(_build, settings, instance_id, undo)
        except (InvalidSettingError, ModelFolderError) as error:
            raise SettingsError(str(error)) from error  # starting again would not help
        except (EngineError, TransferError) as error:
            raise StartError(str(error)) from error
        await _serve_machine(life, machine, settings, files, instance_id, tracing, metrics)
    finally:
        await asyncio.to_thread(undo.close)


def _build(settings: PrefillSettings, instance_id: str, undo: ExitStack) -> _Machine:
    """Loads the model and puts its KV pool into memory that peers can be written from. Blocks for seconds. `undo` gets what is to be closed,
    also when something here raises."""
    prepared = settings.engine.prepare(Role.PREFILL)
    undo.callback(prepared.close)
    from baton.engine import Engine  # torch takes seconds to import: --help and a bad setting need not wait for it

    mark = fingerprint_to_wire(settings.engine.fingerprint(prepared))
    transfer = settings.transfer
    config = AgentConfig(
        instance_id=instance_id,
        transport=transfer.transport,
        expected_transport=transfer.expected_transport,
        transfer_queues=transfer.transfer_queues,
        fingerprint=as_mapping(mark),
    )
    layout, pool = prepared.rank_layout, prepared.device_pool()
    addresses = None if pool is None else [part.address for part in pool.parts]
    memories = open_ranks(config, settings.engine.transfer_devices(), layout.pool_bytes, addresses)
    undo.callback(memories.close)
    log.info("transfer library", description=memories.agents[0].description, ranks=len(memories.ranks))
    page_hashes: Sequence[PageHash] = prepared.page_hashes(pool) or [HostPageHash(layout, partial(digest, region)) for region in memories.regions]
    exporter = Exporter(
        layout, page_hashes, unmatched_timeout_s=settings.unmatched_timeout_s, max_unmatched=settings.max_unmatched, layerwise=settings.layerwise
    )
    undo.callback(exporter.close)
    pool = pool or prepared.host_pool([region.buffer for region in memories.regions])
    engine = Engine(Role.PREFILL, prepared.model, prepared.config, pool=pool, exporter=exporter)
    undo.callback(engine.close)
    engine.warm_up()
    return _Machine(memories, layout, exporter, engine, mark, prepared.model.config.vocab_size)


async def _serve_machine(
    life: Lifecycle, machine: _Machine, settings: PrefillSettings, files: _Files, instance_id: str, tracing: Tracing, metrics: Metrics
) -> None:
    listen, engine, tls, secrets = settings.listen, machine.engine, files.tls, files.secrets
    here = Here(instance_id, machine.fingerprint, machine.rank_layout, machine.memories)
    bootstrap = BootstrapServicer(machine.exporter, here, TicketGate(instance_id, secrets))
    bootstrap_server = GrpcServer(listen.host, settings.bootstrap_port, tls=tls, options=SERVER_OPTIONS, port_flag="--bootstrap-port")
    bootstrap_server.add(bootstrap_pb2_grpc.add_BootstrapServicer_to_server, bootstrap, "baton.v1.Bootstrap")
    server = GrpcServer(listen.host, listen.port, tls=tls, options=SERVER_OPTIONS)
    host = EngineHost(engine, step_time=engine.step_time)
    StepMetrics(metrics).watch(engine)
    GpuMetrics(metrics, settings.engine.transfer_devices())
    observe_exporter(metrics, machine.exporter)
    machine.exporter.on_wake(host.wake)
    await bootstrap_server.start()
    bootstrap_address = join_address(listen.advertised_host(), bootstrap_server.port)
    front = WorkerFront(
        host,
        Limits(Role.PREFILL, machine.vocab_size, engine.max_model_len, engine.layout.num_pages, engine.layout.page_size),
        Description(instance_id, machine.fingerprint.model, version("baton-prefill"), machine.fingerprint, bootstrap_address),
        grammars=Grammars(settings.engine.model_path, machine.vocab_size),
        max_rooms=settings.engine.max_rooms,
        tracer=tracing.tracer("baton.prefill"),
        on_refused=machine.exporter.refuse,
        on_lost=engine_lost(life),
        metrics=metrics,
    )
    add_services(server, front, Role.PREFILL, ledger_of(engine, host, settings.engine))
    door = _sglang_door(settings, front, machine.exporter, tls)
    front.start()
    clocks = [life.watch(asyncio.create_task(bootstrap.run(), name="clock of publications"))]
    clocks.append(life.watch(asyncio.create_task(tls.run(), name="clock of TLS files")))
    if secrets is not None:
        clocks.append(life.watch(asyncio.create_task(secrets.run(), name="clock of secrets")))
    try:
        await server.start()
        await bootstrap_server.set_serving(True)
        addresses = {"grpc": join_address(listen.advertised_host(), server.port), "bootstrap": bootstrap_address}
        addresses |= metrics.listen(settings.metrics, listen, tls.current_context)
        if door is not None:
            addresses["sglang"] = await door.open()
        await serve_until_stopped(
            life, server, front, host, addresses, stall_limit_s=settings.engine.stall_limit_s, join=settings.join, tls=settings.tls
        )
    finally:
        for clock in clocks:
            clock.cancel()
        if door is not None:
            await door.close()
        await bootstrap.close()
        await server.stop(1.0)
        await bootstrap_server.stop(1.0)
        await front.close()


def _sglang_door(settings: PrefillSettings, front: WorkerFront, exporter: Exporter, tls: TlsFiles) -> Door | None:
    """None without --sglang-port, and then nothing of it is imported. Raises StartError."""
    if settings.sglang.port is None:
        return None
    try:
        from baton.sglangcompat import Claims, Door, ModelFilesError
    except ModuleNotFoundError as error:
        raise StartError(f"--sglang-port needs {error.name}, which is not installed: pip install 'baton-prefill[sglang]'") from error
    leg = Claims(exporter, timeout_s=settings.sglang.timeout_s, capacity=settings.engine.max_rooms)
    try:
        return Door(
            front,
            leg,
            model_path=settings.engine.model_path,
            listen=settings.listen,
            settings=settings.sglang,
            tls=tls,
            stall_limit_s=settings.engine.stall_limit_s,
        )
    except ModelFilesError as error:
        raise StartError(str(error)) from error
