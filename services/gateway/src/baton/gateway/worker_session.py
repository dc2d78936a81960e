"""The connection to one worker: describe, one session stream, and again with backoff when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterable

import grpc
import grpc.aio

from baton.gateway.errors import WorkerProtocolError
from baton.gateway.measured import Impossible, clean_info, clean_report
from baton.gateway.worker import Worker
from baton.servicekit import Tls, get_logger, open_channel
from baton.servicekit.tls import explain_refusal
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import worker_pb2, worker_pb2_grpc

log = get_logger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
CONTACT_TIMEOUT_S = 10.0

#: Streams that are woken between two looks at what else there is to do: writing to one takes some 0.06 ms, and a request that has just come
#: waits for some eight such turns before its first token is on its way. One instead of two takes 0.3 ms off it and costs the others nothing.
STREAMS_A_TURN = 1
#: Of rooms with something urgent: writing to them is what is waited for.
URGENT_A_TURN = 8
#: With more tokens than this on their way to the clients, the worker is not read from until there are fewer.
MAX_WAITING_TOKENS = 65_536

SessionCall = grpc.aio.StreamStreamCall[worker_pb2.Command, worker_pb2.Report]


class WorkerSession:
    """Keeps `worker` connected until it is cancelled."""

    def __init__(self, worker: Worker, *, gateway_id: str, gateway_address: str, tls: Tls, silence_limit_s: float, prefix_key: bytes = b"") -> None:
        """prefix_key: the worker is asked to say what its prefix cache holds, under hashes with this key; empty: it is not asked."""
        self._worker = worker
        self._silence_limit_s = silence_limit_s
        self._attach = worker_pb2.Attach(gateway_id=gateway_id, gateway_address=gateway_address, prefix_key=prefix_key)
        self._tls = tls
        self._news = asyncio.Event()
        #: Fields of which the process there reported what cannot be: each is logged once.
        self._impossible: set[str] = set()
        self._log = log.bind(role=worker.leg.value, address=worker.address)

    async def run(self) -> None:
        """Never returns. A worker that is away is tried about once a second."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                problem = await self._one_session()
            except (grpc.aio.AioRpcError, WorkerProtocolError, TimeoutError) as error:
                problem = self._explain(error)
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
            helpers: list[asyncio.Task[None]] = []
            try:
                await self._greet(stub, call)
                helpers.append(asyncio.create_task(self._write(call), name=f"commands to {self._worker.address}"))
                helpers.append(asyncio.create_task(self._listen(stub), name=f"signs of life of {self._worker.address}"))
                parts = [asyncio.create_task(part, name=f"reports of {self._worker.address}") for part in (self._hand_out(), self._read(call))]
                helpers += parts
                ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in ended:
                    part.result()
            finally:
                call.cancel()
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
        return "it closed the session"

    async def _greet(self, stub: worker_pb2_grpc.WorkerAsyncStub, call: SessionCall) -> None:
        """The session is opened before the worker is asked who it is: should another process answer, this stream is already broken."""
        async with asyncio.timeout(CONTACT_TIMEOUT_S):
            await call.write(worker_pb2.Command(attach=self._attach))
            first = await call.read()
            if not isinstance(first, worker_pb2.Report):
                raise WorkerProtocolError(f"it ended the session at once: {await call.code()} {await call.details()}")
            info = await stub.Describe(worker_pb2.DescribeRequest())
        if not isinstance(info, worker_pb2.WorkerInfo):  # what gRPC makes of bytes that are none
            raise WorkerProtocolError(
                "what it says of itself cannot be read: it is no server of Baton's, or one of a version that is too far from this one"
            )
        self._worker.check(info)
        before = self._worker.instance_id
        if before != info.instance_id:
            self._impossible.clear()
        impossible = clean_info(info) + clean_report(first)
        self._worker.came(info)
        self._note_impossible(impossible)
        self._worker.take(first)
        self._news.set()
        self._log.info("worker connected", worker=info.instance_id, model=info.model, replaces=before if before != info.instance_id else "")

    async def _read(self, call: SessionCall) -> None:
        worker = self._worker
        while isinstance(report := await call.read(), worker_pb2.Report):
            worker.heard(time.monotonic())
            self._note_impossible(clean_report(report))
            worker.take(report)
            if worker.num_urgent:
                worker.hand_out(min(worker.num_urgent, URGENT_A_TURN))
            self._news.set()
            while worker.num_waiting_tokens > MAX_WAITING_TOKENS and worker.hand_out(STREAMS_A_TURN):  # noqa: ASYNC110 # it is this loop that empties it
                await asyncio.sleep(0)

    def _note_impossible(self, found: Iterable[Impossible]) -> None:
        for one in found:
            if one.field not in self._impossible:
                self._impossible.add(one.field)
                self._log.warning(
                    "worker reports a number that cannot be", worker=self._worker.instance_id, field=one.field, value=str(one.value), limit=one.limit
                )

    async def _hand_out(self) -> None:
        """Tells the rooms what the reader has taken, a few at a time."""
        worker = self._worker
        while True:
            await self._news.wait()
            self._news.clear()
            while worker.hand_out(URGENT_A_TURN if worker.num_urgent else STREAMS_A_TURN):  # noqa: ASYNC110 # it waits for nothing: others get a turn
                await asyncio.sleep(0)

    async def _listen(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        """Asks a worker that says nothing whether it is there: an idle one is silent too, and gRPC finds a frozen process only after 15 s.

        Time in which this process itself stood still is not counted against the worker.
        """
        worker, interval_s = self._worker, self._silence_limit_s / 4
        asking: asyncio.Task[None] | None = None
        counted_from = time.monotonic()
        try:
            while True:
                before = time.monotonic()
                await asyncio.sleep(interval_s)
                now = time.monotonic()
                if now - before > 2 * interval_s:
                    counted_from = now
                age_s = now - max(worker.heard_at, counted_from)
                if age_s > self._silence_limit_s:
                    if not worker.silent:
                        self._log.warning("worker silent", worker=worker.instance_id, silent_s=round(age_s, 3), rooms=worker.num_rooms)
                    worker.is_silent(age_s)
                if age_s >= interval_s and (asking is None or asking.done()):
                    asking = asyncio.create_task(self._ask(stub), name=f"question to {worker.address}")
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        """No answer is no sign of life; that the connection broke, the session's reader sees as well."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Describe(worker_pb2.DescribeRequest(), timeout=self._silence_limit_s)
            if self._worker.silent:
                self._log.info("worker heard again", worker=self._worker.instance_id)
            self._worker.heard(time.monotonic())

    async def _write(self, call: SessionCall) -> None:
        """Ends when the stream is broken, which the reader sees as well."""
        while True:
            await call.write(await self._worker.outbox.take())

    def _explain(self, error: BaseException) -> str:
        if isinstance(error, grpc.aio.AioRpcError):
            return f"{error.code().name}: {explain_refusal(error.details() or '', self._tls, was_in_use=self._worker.connected)}"
        if isinstance(error, TimeoutError):
            return f"it did not answer within {CONTACT_TIMEOUT_S:g} s"
        return str(error)
