"""The connection to one worker: describe, one session stream, and again with backoff when it ends."""

from __future__ import annotations

import asyncio
import random

import grpc
import grpc.aio

from baton.gateway.errors import WorkerProtocolError
from baton.gateway.worker import Worker
from baton.servicekit import TlsSettings, get_logger, open_channel
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import worker_pb2, worker_pb2_grpc

log = get_logger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
CONTACT_TIMEOUT_S = 10.0

SessionCall = grpc.aio.StreamStreamCall[worker_pb2.Command, worker_pb2.Report]


class WorkerSession:
    """Keeps `worker` connected until it is cancelled."""

    def __init__(self, worker: Worker, *, gateway_id: str, gateway_address: str, tls: TlsSettings) -> None:
        self._worker = worker
        self._attach = worker_pb2.Attach(gateway_id=gateway_id, gateway_address=gateway_address)
        self._tls = tls
        self._log = log.bind(role=worker.leg.value, address=worker.address)

    async def run(self) -> None:
        """Never returns. A worker that is away is tried about once a second."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                problem = await self._one_session()
            except (grpc.aio.AioRpcError, WorkerProtocolError, TimeoutError) as error:
                problem = _explain(error)
            backoff_s = FIRST_BACKOFF_S if self._worker.connected else min(backoff_s * 2, MAX_BACKOFF_S)
            self._gone(problem)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    def _gone(self, problem: str) -> None:
        worker = self._worker
        if worker.connected:
            self._log.warning("worker lost", worker=worker.instance_id, problem=problem, rooms=worker.num_rooms)
        elif problem != worker.problem:
            self._log.warning("worker away", problem=problem)
        worker.went(problem)

    async def _one_session(self) -> str:
        """From connecting to the end of the stream; why it ended. A fresh channel each time: nothing of an earlier process lives on in it."""
        async with open_channel(self._worker.address, self._tls, CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            call: SessionCall = stub.Session()
            writer: asyncio.Task[None] | None = None
            try:
                await self._greet(stub, call)
                writer = asyncio.create_task(self._write(call), name=f"commands to {self._worker.address}")
                await self._read(call)
            finally:
                call.cancel()
                if writer is not None:
                    writer.cancel()
                    await asyncio.gather(writer, return_exceptions=True)
        return "it closed the session"

    async def _greet(self, stub: worker_pb2_grpc.WorkerAsyncStub, call: SessionCall) -> None:
        """The session is opened before the worker is asked who it is: should another process answer, this stream is already broken."""
        async with asyncio.timeout(CONTACT_TIMEOUT_S):
            await call.write(worker_pb2.Command(attach=self._attach))
            first = await call.read()
            if not isinstance(first, worker_pb2.Report):
                raise WorkerProtocolError(f"it ended the session at once: {await call.code()} {await call.details()}")
            info = await stub.Describe(worker_pb2.DescribeRequest())
        self._worker.check(info)
        before = self._worker.instance_id
        self._worker.came(info)
        self._worker.take(first)
        self._log.info("worker connected", worker=info.instance_id, model=info.model, replaces=before if before != info.instance_id else "")

    async def _read(self, call: SessionCall) -> None:
        while isinstance(report := await call.read(), worker_pb2.Report):
            self._worker.take(report)

    async def _write(self, call: SessionCall) -> None:
        """Ends when the stream is broken, which the reader sees as well."""
        while True:
            await call.write(await self._worker.outbox.take())


def _explain(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, TimeoutError):
        return f"it did not answer within {CONTACT_TIMEOUT_S:g} s"
    return str(error)
