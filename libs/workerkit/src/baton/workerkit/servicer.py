"""The Worker contract over gRPC: one multiplexed session a gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.servicekit import get_logger
from baton.wire.prefix import MAX_KEY_BYTES
from baton.wire.v1 import worker_pb2, worker_pb2_grpc
from baton.workerkit.convert import failure_from_wire
from baton.workerkit.front import WorkerFront
from baton.workerkit.prefix_ledger import PrefixLedger
from baton.workerkit.session import GatewaySession

log = get_logger(__name__)

#: How long a gateway may take to read its last report.
LAST_REPORT_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Translates the stream's commands into calls of the front, and the front's reports into messages."""

    def __init__(self, front: WorkerFront, prefixes: PrefixLedger | None = None) -> None:
        """prefixes: what gateways that ask for it are told of the prefix cache; None: nobody is."""
        self._front = front
        self._prefixes = prefixes

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.WorkerInfo:  # noqa: N802
        return self._front.describe()

    async def Session(  # type: ignore[override]  # noqa: N802 # a coroutine that writes: the stubs know generators only
        self, request_iterator: AsyncIterator[worker_pb2.Command], context: Context
    ) -> None:
        """Ends when the gateway closes its half, breaks the stream, or speaks out of turn; its rooms end with it."""
        session = await self._first(request_iterator, context)
        self._front.attach(session)
        reader = asyncio.create_task(self._read(session, request_iterator))
        writer = asyncio.create_task(self._write(session, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._front.detach(session)
            reader.cancel()
            # A write that is cancelled half way leaves the call unable to end with a status: let it finish where the gateway still reads.
            session.end()
            await asyncio.wait((writer,), timeout=LAST_REPORT_S)
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        error = None if reader.cancelled() else reader.exception()
        if isinstance(error, _OutOfTurnError):
            await _refuse(context, str(error))
        if isinstance(error, DecodeError):
            await _refuse(context, f"a command cannot be read: {error}", grpc.StatusCode.INVALID_ARGUMENT)
        if error is not None and not isinstance(error, grpc.aio.BaseError):
            raise error

    async def _first(self, commands: AsyncIterator[worker_pb2.Command], context: Context) -> GatewaySession:
        try:
            command = await anext(aiter(commands), None)
        except DecodeError as error:
            await _refuse(context, f"the first command cannot be read: {error}", grpc.StatusCode.INVALID_ARGUMENT)
        if command is None or command.WhichOneof("command") != "attach":
            await _refuse(context, "the first command of a session must be attach")
        attach, key = command.attach, command.attach.prefix_key
        if len(key) > MAX_KEY_BYTES:
            await _refuse(context, f"attach.prefix_key has {len(key)} bytes, the limit is {MAX_KEY_BYTES}", grpc.StatusCode.INVALID_ARGUMENT)
        teller = self._prefixes.teller(key) if key and self._prefixes is not None else None
        return GatewaySession(attach.gateway_id, attach.gateway_address, teller)

    async def _read(self, session: GatewaySession, commands: AsyncIterator[worker_pb2.Command]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "start":
                    self._front.start_room(session, command.start)
                case "abort":
                    abort = command.abort
                    self._front.abort_room(abort.room, failure_from_wire(abort.failure, default_origin="gateway"))
                case "peers":
                    self._front.set_peers(session, command.peers.bootstrap_addresses)
                case "drain":
                    self._front.drain()
                case "attach":
                    raise _OutOfTurnError("attach came twice on one session")
                case None:
                    log.warning("command of an unknown kind ignored", gateway_id=session.gateway_id)

    async def _write(self, session: GatewaySession, context: Context) -> None:
        while (report := await session.next_report()) is not None:
            with contextlib.suppress(asyncio.InvalidStateError):
                await context.write(report)


class _OutOfTurnError(Exception):
    """The gateway broke the session's order of messages."""


async def _refuse(context: Context, message: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort returns never")
