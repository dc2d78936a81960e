"""The gateway's process: the only place where its parts are wired."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable

import grpc
import uvloop

from baton.gateway.config import GatewaySettings
from baton.gateway.dispatch import Dispatcher
from baton.gateway.errors import ModelFolderError
from baton.gateway.fleet import Fleet
from baton.gateway.grpc_front import SERVICE, InferenceServicer, register
from baton.gateway.http.app import OpenAIFront
from baton.gateway.http.server import HttpServer
from baton.gateway.inference import Inference
from baton.gateway.live_room import Timeouts
from baton.gateway.model_folder import read_model_folder
from baton.gateway.rooms import RoomTable
from baton.gateway.routing import Router
from baton.gateway.tokenizer import PromptTokenizer
from baton.gateway.worker import Leg, Worker
from baton.gateway.worker_session import WorkerSession
from baton.servicekit import (
    GrpcServer,
    Lifecycle,
    SettingsError,
    Tracing,
    configure_logs,
    configure_tracing,
    get_logger,
    join_address,
    new_instance_id,
    run,
)
from baton.wire.channel import SERVER_OPTIONS
from baton.wire.status import code_number
from baton.wire.v1 import common_pb2

log = get_logger(__name__)

#: What an aborted client gets to take its last message.
_LAST_WORDS_S = 1.0


class Gateway:
    """Everything of one gateway. `start`, then `drain`, then `stop`, on one event loop."""

    def __init__(self, settings: GatewaySettings, tokenizer: PromptTokenizer, tracing: Tracing, instance_id: str) -> None:
        self._settings = settings
        self._instance_id = instance_id
        self._tokenizer = tokenizer
        self._changes: asyncio.Queue[bool] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.rooms = RoomTable(settings.max_rooms)
        self.fleet = Fleet(self._workers(), self._changes.put_nowait)
        timeouts = Timeouts(settings.bootstrap_timeout_s, settings.waiting_timeout_s, settings.transfer_timeout_s)
        inference = Inference(
            model_name=settings.served_name,
            tokenizer=tokenizer,
            fleet=self.fleet,
            dispatcher=Dispatcher(self.rooms, Router(settings.routing), timeouts, settings.max_buffered_tokens),
            request_timeout_s=settings.request_timeout_s,
            retries=settings.retries,
            tracer=tracing.tracer("baton.gateway"),
        )
        options = dict(SERVER_OPTIONS) | {"grpc.max_receive_message_length": settings.max_body_bytes}
        self.grpc = GrpcServer(settings.listen.host, settings.listen.port, tls=settings.tls, options=[*options.items()])
        self.grpc.add(register, InferenceServicer(inference), SERVICE)
        front = OpenAIFront(inference, self.rooms, settings.max_body_bytes, started_at_s=int(time.time()))
        self.http = HttpServer(front.app(), settings.http_address_host, settings.http_port, settings.tls)

    def _workers(self) -> list[Worker]:
        settings = self._settings
        named = [(Leg.PREFILL, settings.prefill), (Leg.DECODE, settings.decode), (Leg.PLAIN, settings.plain)]
        return [
            Worker(address, leg, min_vocab_size=self._tokenizer.vocab_size, stall_limit_s=settings.stall_limit_s)
            for leg, addresses in named
            for address in addresses
        ]

    async def start(self, on_failure: Callable[[BaseException], None]) -> dict[str, str]:
        """Listens, begins to connect to the fleet, and returns the addresses. Health follows the fleet from now on.

        `on_failure` is told when a task of ours ends, which none ever should.
        """
        await self.grpc.start()
        await self.http.start()
        advertised = join_address(self._settings.listen.advertised_host(), self.grpc.port)
        sessions = [
            WorkerSession(
                worker,
                gateway_id=self._instance_id,
                gateway_address=advertised,
                tls=self._settings.tls,
                silence_limit_s=self._settings.silence_limit_s,
            )
            for worker in self.fleet.workers
        ]
        self._tasks = [asyncio.create_task(session.run(), name=f"session {number}") for number, session in enumerate(sessions)]
        self._tasks.append(asyncio.create_task(self._follow_fleet(), name="health"))
        for task in self._tasks:
            task.add_done_callback(lambda ended: _tell_failure(ended, on_failure))
        return {"grpc": advertised, "http": join_address(self._advertised_http_host(), self.http.port)}

    def _advertised_http_host(self) -> str:
        listen = self._settings.listen
        return listen.model_copy(update={"host": self._settings.http_address_host}).advertised_host()

    async def _follow_fleet(self) -> None:
        while True:
            await self.grpc.set_serving(await self._changes.get())

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests, lets open ones end, and aborts those that have not after `timeout_s`."""
        self.rooms.draining = True
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
        await asyncio.gather(self.http.stop(_LAST_WORDS_S), self.grpc.stop(_LAST_WORDS_S))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tokenizer.close()


def _tell_failure(task: asyncio.Task[None], on_failure: Callable[[BaseException], None]) -> None:
    if not task.cancelled():
        on_failure(task.exception() or RuntimeError(f"task {task.get_name()} ended"))


@contextlib.asynccontextmanager
async def running(
    settings: GatewaySettings, tokenizer: PromptTokenizer, tracing: Tracing, instance_id: str, on_failure: Callable[[BaseException], None]
) -> AsyncIterator[tuple[Gateway, dict[str, str]]]:
    """A gateway that listens, and its addresses; stopped on leaving, by whatever road. It closes `tokenizer`."""
    gateway = Gateway(settings, tokenizer, tracing, instance_id)
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
        tracing = configure_tracing(settings.traces, service="gateway", instance_id=instance_id)
        tokenizer = PromptTokenizer(read_model_folder(settings.model_path), num_threads=settings.tokenizer_threads)
    except (SettingsError, ModelFolderError) as error:
        print(f"baton-gateway: {error}", file=sys.stderr)  # noqa: T201
        return 2

    async def serve(life: Lifecycle) -> None:
        async with running(settings, tokenizer, tracing, instance_id, life.fail) as (gateway, addresses):
            life.ready(addresses)
            await life.stopped()
            await gateway.drain(life.drain_timeout_s)

    try:
        return run(serve, service="gateway", instance_id=instance_id, listen=settings.listen, loop_factory=uvloop.new_event_loop)
    finally:
        tracing.shutdown()


if __name__ == "__main__":
    sys.exit(main())
