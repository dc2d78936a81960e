"""The gateway's process: the only place where its parts are wired."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # `python -m baton.gateway.app` is `python -m baton.gateway`: signals are answered before the imports below
    from baton.gateway.__main__ import main as start

    sys.exit(start())

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from baton.gateway.body_limits import body_limits
from baton.gateway.callers import Doorkeeper
from baton.gateway.client_handler import LAST_WORDS_S
from baton.gateway.config import GatewaySettings
from baton.gateway.console.console import Console
from baton.gateway.discovery.discovery import Discovery
from baton.gateway.dispatch import Dispatcher
from baton.gateway.errors import ModelFolderError
from baton.gateway.fleet import Fleet
from baton.gateway.gate import Gate
from baton.gateway.grpc_front import SERVICE, InferenceServicer, register
from baton.gateway.http.app import OpenAIFront
from baton.gateway.http.protocol import HttpLimits
from baton.gateway.http.server import HttpServer
from baton.gateway.inference import Inference
from baton.gateway.local_prefill import LocalPrefill
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.model_folder import read_model_folder
from baton.gateway.processes.parent import Parent
from baton.gateway.retry import RetryPolicy
from baton.gateway.room_clock import Timeouts
from baton.gateway.rooms import RoomTable
from baton.gateway.routing import Router
from baton.gateway.shares import Shares
from baton.gateway.structured import GrammarCheck
from baton.gateway.tickets import TicketOffice
from baton.gateway.tokenizer import PromptTokenizer
from baton.gateway.worker import Leg, Worker
from baton.gateway.worker_session import WorkerSession
from baton.servicekit import (
    GrpcServer,
    KeyLimits,
    Lifecycle,
    Metrics,
    SettingsError,
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
    watch_api_keys,
    watch_secrets,
)
from baton.wire.channel import SERVER_OPTIONS
from baton.wire.status import code_number
from baton.wire.ticket import TicketKeys
from baton.wire.v1 import common_pb2

log = get_logger(__name__)

#: What an aborted client gets to take its last message.
_LAST_WORDS_S = 1.0
#: How long one of several processes waits for servers that it can use before it takes its part of the port's connections.
FIRST_ROUTE_S = 3.0
PREFIX_KEY_BYTES = 16


class Gateway:
    """Everything of one gateway. `start`, then `drain`, then `stop`, on one event loop."""

    def __init__(
        self, settings: GatewaySettings, tokenizer: PromptTokenizer, tracing: Tracing, instance_id: str, metrics: Metrics | None = None
    ) -> None:
        self._settings = settings
        self._open_metrics = metrics or Metrics((), service="gateway", role="gateway", instance_id=instance_id)
        self._instance_id = instance_id
        self._tokenizer = tokenizer
        self._grammars = GrammarCheck(settings.model_path / "tokenizer.json")
        self._changes: asyncio.Queue[bool] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._tls = TlsFiles(settings.tls)
        self._front_tls = TlsFiles(settings.front_tls)
        #: Files that are read again when they change.
        self._watched: list[Watched[Any]] = []
        self.rooms = RoomTable(settings.max_rooms)
        self.fleet = Fleet(self._changes.put_nowait)
        # Only a router that asks for it makes servers say what they hold.
        self._prefix_key = secrets.token_bytes(PREFIX_KEY_BYTES) if settings.routing == "prefix-aware" else b""
        self.router = Router(settings.routing, balance=settings.routing_balance, prefix_key=self._prefix_key)
        self.fleet.on_instance_gone = self.router.forget
        self.discovery = Discovery(settings, self.fleet, instance_id, self._make_worker, self._task_ended)
        self._on_failure: Callable[[BaseException], None] = lambda error: None
        timeouts = Timeouts(settings.bootstrap_timeout_s, settings.waiting_timeout_s, settings.transfer_timeout_s)
        self.gate = Gate(self.rooms, max_queue=settings.max_queue, queue_timeout_s=settings.queue_timeout_s)
        self.rooms.on_free = self.gate.room_freed
        self.shares = Shares()
        self.metrics = GatewayMetrics(self._open_metrics, self.rooms, self.gate, self.fleet)
        doorkeeper = self.doorkeeper = self._doorkeeper()
        self.console = Console(settings, instance_id, self.rooms, self.gate, self.fleet, doorkeeper) if settings.console else None
        inference = Inference(
            model_name=settings.served_name,
            tokenizer=tokenizer,
            grammars=self._grammars,
            fleet=self.fleet,
            dispatcher=Dispatcher(
                self.rooms,
                self.router,
                timeouts,
                settings.max_buffered_tokens,
                LocalPrefill(settings.local_prefill_max_tokens),
                self._ticket_office(),
                self.metrics.gaps,
            ),
            gate=self.gate,
            shares=self.shares,
            request_timeout_s=settings.request_timeout_s,
            unread_timeout_s=settings.unread_timeout_s,
            retry_policy=RetryPolicy(settings.retries, settings.kv_load_failure_policy),
            tracer=tracing.tracer("baton.gateway"),
            metrics=self.metrics,
            recorder=self.console.recorder if self.console else None,
        )
        shares_ports = settings.process_index is not None
        limits = body_limits(settings.max_body_bytes, tokenizer.context_tokens, tokenizer.bound)
        options = dict(SERVER_OPTIONS) | grpc_limits(settings, limits.num_bytes) | {"grpc.so_reuseport": int(shares_ports)}
        self.grpc = GrpcServer(settings.listen.host, settings.listen.port, tls=self._front_tls, options=[*options.items()])
        self.grpc.add(register, InferenceServicer(inference, doorkeeper, limits.num_values), SERVICE)
        self.discovery.serve(self.grpc, doorkeeper)
        if self.console is not None:
            self.console.serve(self.grpc)
            self.console.join(self.discovery.relay)
        front = OpenAIFront(
            inference,
            self.rooms,
            limits,
            started_at_s=int(time.time()),
            doorkeeper=doorkeeper,
            body_timeout_s=settings.http_body_timeout_s,
            more_routes=tuple(self.console.routes()) if self.console else (),
        )
        self.http = HttpServer(
            front.app(), settings.http_address_host, settings.http_port, self._front_tls, http_limits(settings), shares_port=shares_ports
        )

    def _doorkeeper(self) -> Doorkeeper:
        settings, keys = self._settings, None
        if settings.api_key_file is not None:
            keys = watch_api_keys("--api-key-file", settings.api_key_file)
            self._watched.append(keys)
            if settings.tls.cert_file is None and not settings.listen.is_loopback():
                log.warning(
                    "API keys travel in plain text: set --tls-cert-file and --tls-key-file, or let a proxy encrypt", host=settings.listen.host
                )
        defaults = KeyLimits(settings.key_max_concurrent, settings.key_requests_per_minute, settings.key_tokens_in_flight)
        return Doorkeeper(keys, defaults)

    def _ticket_office(self) -> TicketOffice:
        keys = None
        if self._settings.ticket_secret_file is not None:
            keys = watch_secrets("--ticket-secret-file", self._settings.ticket_secret_file, TicketKeys)
            self._watched.append(keys)
        return TicketOffice(keys, bootstrap_timeout_s=self._settings.bootstrap_timeout_s)

    def _make_worker(self, address: str, leg: Leg) -> tuple[Worker, WorkerSession]:
        settings = self._settings
        worker = Worker(address, leg, min_vocab_size=self._tokenizer.vocab_size, stall_limit_s=settings.stall_limit_s)
        session = WorkerSession(
            worker,
            gateway_id=self._instance_id,
            gateway_address=self._advertised_grpc(),
            tls=self._tls,
            silence_limit_s=settings.silence_limit_s,
            prefix_key=self._prefix_key,
        )
        return worker, session

    def _advertised_grpc(self) -> str:
        return join_address(self._settings.listen.advertised_host(), self.grpc.port or self._settings.listen.port)

    async def start(self, on_failure: Callable[[BaseException], None]) -> dict[str, str]:
        """Listens, begins to connect to the fleet, and returns the addresses. Health follows the fleet from now on.

        `on_failure` is told when a task of ours ends, which none ever should.
        """
        await self.discovery.listen()
        self._on_failure = on_failure
        if self._settings.process_index is None:
            await self._listen()
        self._tasks = [asyncio.create_task(part, name="discovery") for part in self.discovery.start()]
        if self._settings.process_index is not None:
            # The port is others' too: from the moment on when this process listens, a part of all connections is its own.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.fleet.wait_ready(), FIRST_ROUTE_S)
            await self._listen()
        self._tasks.append(asyncio.create_task(self._follow_fleet(), name="health"))
        if self.console is not None:
            self._tasks.append(asyncio.create_task(self.console.run(), name="console"))
        self._tasks += [asyncio.create_task(watched.run(), name=f"clock of {watched.what}") for watched in [*self._watched, *self.discovery.watched]]
        self._tasks += [asyncio.create_task(files.run(), name="clock of TLS files") for files in (self._tls, self._front_tls)]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        addresses = {"grpc": self._advertised_grpc(), "http": join_address(self._advertised_http_host(), self.http.port)}
        return addresses | self._listen_for_scrapes()

    async def _listen(self) -> None:
        await self.grpc.start()
        await self.http.start()

    def _listen_for_scrapes(self) -> dict[str, str]:
        """Each of several processes has a port of its own: a scrape must reach the same one again."""
        settings = self._settings
        index = settings.process_index or 0
        return self._open_metrics.listen(settings.metrics, settings.listen, self._tls.current_context, port_offset=index)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._on_failure(task.exception() or RuntimeError(f"task {task.get_name()} ended"))

    def _advertised_http_host(self) -> str:
        listen = self._settings.listen
        return listen.model_copy(update={"host": self._settings.http_address_host}).advertised_host()

    async def _follow_fleet(self) -> None:
        while True:
            await self.grpc.set_serving(await self._changes.get())

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests, lets open ones end, and aborts those that have not after `timeout_s`."""
        self.rooms.draining = True
        self.gate.drain()
        await self.grpc.drain()
        log.info("draining", rooms=len(self.rooms), timeout_s=timeout_s)
        if await self.rooms.wait_idle(timeout_s):
            return
        aborted = self.rooms.abort_all(
            common_pb2.Failure(
                code=code_number(grpc.StatusCode.UNAVAILABLE),
                origin=common_pb2.ORIGIN_GATEWAY,
                cause="gateway_stopped",
                message=f"the gateway stops and this request has not ended within the drain timeout of {timeout_s:g} s: send it again",
                allowed_ms=round(timeout_s * 1e3),
            )
        )
        log.warning("rooms aborted at the end of the drain", rooms=aborted)

    async def stop(self) -> None:
        """Ends what is left: fronts first, then the sessions, which ends whatever the workers still hold of ours."""
        if self.console is not None:
            self.console.close()
        await asyncio.gather(self.http.stop(_LAST_WORDS_S), self.grpc.stop(_LAST_WORDS_S))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.discovery.close()
        self._tokenizer.close()


def grpc_limits(settings: GatewaySettings, max_body_bytes: int) -> dict[str, int]:
    """What one gRPC connection may take of this process, and how many there may be."""
    return {
        "grpc.max_receive_message_length": max_body_bytes,
        "grpc.max_metadata_size": settings.http_max_head_bytes,
        "grpc.absolute_max_metadata_size": settings.http_max_head_bytes,
        # more could neither run nor wait
        "grpc.max_concurrent_streams": settings.max_rooms + settings.max_queue + 1,
        "grpc.max_allowed_incoming_connections": settings.grpc_max_connections,
        "grpc.max_connection_idle_ms": round(settings.grpc_idle_timeout_s * 1e3),
        "grpc.server_handshake_timeout_ms": round(settings.http_head_timeout_s * 1e3),
    }


def http_limits(settings: GatewaySettings) -> HttpLimits:
    """A stalled answer's own limit is passed first: it knows the room."""
    unread_s = settings.unread_timeout_s + LAST_WORDS_S + 1.0
    return HttpLimits(settings.http_max_connections, settings.http_max_head_bytes, settings.http_head_timeout_s, unread_s)


@contextlib.asynccontextmanager
async def running(
    settings: GatewaySettings,
    tokenizer: PromptTokenizer,
    tracing: Tracing,
    instance_id: str,
    on_failure: Callable[[BaseException], None],
    metrics: Metrics | None = None,
) -> AsyncIterator[tuple[Gateway, dict[str, str]]]:
    """A gateway that listens, and its addresses; stopped on leaving, by whatever road. It closes `tokenizer`."""
    gateway = Gateway(settings, tokenizer, tracing, instance_id, metrics)
    try:
        yield gateway, await gateway.start(on_failure)
    finally:
        await gateway.stop()


def main() -> int:
    """Entry point of `baton-gateway`; the exit status (2: settings or a model folder that cannot be used)."""
    try:
        settings = GatewaySettings.load(sys.argv[1:], os.environ)
        instance_id = settings.listen.instance_id or new_instance_id("gateway")
        configure_logs(settings.log, service="gateway", instance_id=instance_id)
        if settings.starts_others:
            return lead(settings, instance_id)
        tracing = configure_tracing(settings.traces, service="gateway", instance_id=instance_id)
        metrics = configure_metrics(settings.metrics, service="gateway", instance_id=instance_id)
        tokenizer = PromptTokenizer(
            read_model_folder(settings.model_path),
            num_threads=settings.tokenizer_threads,
            calls=settings.tool_call_format,
            reasoning=settings.reasoning_format,
        )
    except (SettingsError, ModelFolderError) as error:
        print(f"baton-gateway: {error}", file=sys.stderr)  # noqa: T201
        return 2

    async def serve(life: Lifecycle) -> None:
        async with running(settings, tokenizer, tracing, instance_id, life.fail, metrics) as (gateway, addresses):
            life.ready(addresses)
            await life.stopped()
            await gateway.drain(life.drain_timeout_s)

    try:
        return run(serve, service="gateway", instance_id=instance_id, listen=settings.listen)
    finally:
        tracing.shutdown()
        metrics.shutdown()
        if settings.process_folder is not None and os.getppid() != settings.listen.parent_pid:
            with contextlib.suppress(OSError):
                settings.process_folder.rmdir()  # its owner was killed: the last of us to go takes it along, the others find it full


def lead(settings: GatewaySettings, instance_id: str) -> int:
    """The parent's part of several processes; the exit status."""
    parent = Parent(settings, instance_id, sys.argv[1:])
    status = run(parent.run, service="gateway", instance_id=instance_id, listen=settings.listen)
    return status or parent.status
