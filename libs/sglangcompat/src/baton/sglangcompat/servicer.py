"""sglang.grpc.scheduler.SglangScheduler over a worker's front. What this server has not is refused by name with UNIMPLEMENTED."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from smg_grpc_proto.generated import sglang_scheduler_pb2

from baton.engine.types import Failure
from baton.servicekit import get_logger
from baton.sglangcompat import replies
from baton.sglangcompat.about import About, chunks
from baton.sglangcompat.leg import Leg
from baton.sglangcompat.requests import to_start
from baton.sglangcompat.session import RoomSession
from baton.wire.status import failure_status, status_code, trailing_metadata
from baton.wire.v1 import common_pb2, worker_pb2
from baton.workerkit import RefusedError, WorkerFront
from baton.workerkit.convert import failure_to_wire

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

MAX_REASON_CHARS = 200
_GONE = Failure("CANCELLED", "client", "client_left", "the gateway closed the stream of this request")


class _Call:
    """One request that is being answered."""

    def __init__(self, start: worker_pb2.Start) -> None:
        self.start = start
        self.session = RoomSession()
        self.is_started = False
        self.aborted: Failure | None = None


class SchedulerServicer:
    """Every request is a room of the front, of which this is the gateway. timeout_s: how long one may wait for its other half, and then for its
    first KV page. problem: why this server is not to be given requests, in words; "": it is.
    """

    def __init__(self, front: WorkerFront, leg: Leg, about: About, *, timeout_s: float, problem: Callable[[], str]) -> None:
        self._front = front
        self._leg = leg
        self._about = about
        self._timeout_ms = round(timeout_s * 1e3)
        self._problem = problem
        self._calls: dict[str, _Call] = {}

    # --- requests -------------------------------------------------------------------------------------------------------------

    async def Generate(self, request: Any, context: Context) -> None:  # noqa: N802
        """Sends initial metadata once the request is taken: the gateway waits for that of both servers."""
        call: _Call | None = None
        try:
            call = self._take(request, context)
            await self._answer(call, request, context)
        except RefusedError as refusal:
            origin = "prefill" if self._leg.is_prefill else "decode"
            failure = failure_to_wire(Failure(refusal.code, origin, refusal.cause, refusal.message))
            failure.stage = common_pb2.ROOM_STATE_BOOTSTRAPPING
            if call is not None and not call.is_started:
                self._leg.forsake(call.start.room, Failure(refusal.code, origin, refusal.cause, refusal.message))
            log.info("request refused", request_id=request.request_id[:80], cause=refusal.cause, reason=refusal.message)
            await _end(context, failure)
        finally:
            if call is not None:
                self._leave(request.request_id, call)

    async def Abort(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Idempotent: the gateway says it of requests that are over, too."""
        call = self._calls.get(request.request_id)
        if call is None:
            return sglang_scheduler_pb2.AbortResponse(success=True, message="no such request is open")
        failure = Failure("CANCELLED", "client", "aborted", f"the gateway aborted the request: {request.reason[:MAX_REASON_CHARS]}")
        call.aborted = failure
        if call.is_started:
            self._front.abort_room(call.start.room, failure)
        else:
            self._leg.forsake(call.start.room, failure)
        return sglang_scheduler_pb2.AbortResponse(success=True)

    def _take(self, request: Any, context: Context) -> _Call:
        start = to_start(request, self._front.describe(), self._about.eos_token_ids)
        if request.request_id in self._calls:
            raise RefusedError("ALREADY_EXISTS", "room_used", f"request_id={request.request_id!r} is being answered already")
        if self._front.draining:
            raise RefusedError("UNAVAILABLE", "draining", "this server is draining and takes no new requests: choose another")
        remaining_s = context.time_remaining()
        start.deadline_ms = 0 if remaining_s is None else max(1, round(remaining_s * 1e3))
        start.bootstrap_timeout_ms = start.waiting_timeout_ms = self._timeout_ms
        start.traceparent = next((str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"), "")
        call = self._calls[request.request_id] = _Call(start)
        return call

    async def _answer(self, call: _Call, request: Any, context: Context) -> None:
        if self._leg.is_prefill:
            await context.send_initial_metadata(())
        await self._leg.join(call.start, request.disaggregated_params)
        if call.aborted is not None:
            raise RefusedError(call.aborted.code, call.aborted.cause, call.aborted.message)
        call.is_started = True
        self._front.start_room(call.session, call.start)
        if call.session.failure is None and not self._leg.is_prefill:
            await context.send_initial_metadata(())
        num_prompt, num_sent = len(call.start.prompt_token_ids), 0
        while tokens := await call.session.take():
            num_sent += len(tokens)
            if request.stream and not self._leg.is_prefill:
                await context.write(replies.chunk(request.request_id, tokens, call.session, num_prompt, num_sent))
        if call.session.failure is not None:
            await _end(context, call.session.failure)
        await context.write(replies.complete(request.request_id, call.session, num_prompt))

    def _leave(self, request_id: str, call: _Call) -> None:
        del self._calls[request_id]
        if not call.is_started:
            self._leg.forsake(call.start.room, _GONE)
        elif not call.session.is_over:
            self._front.abort_room(call.start.room, _GONE)

    # --- what this server is --------------------------------------------------------------------------------------------------

    async def HealthCheck(self, request: Any, context: Context) -> Any:  # noqa: N802
        problem = self._problem()
        return sglang_scheduler_pb2.HealthCheckResponse(healthy=not problem, message=problem)

    async def GetModelInfo(self, request: Any, context: Context) -> Any:  # noqa: N802
        return self._about.model(self._front.describe())

    async def GetServerInfo(self, request: Any, context: Context) -> Any:  # noqa: N802
        return self._about.server(self._front.describe())

    async def GetLoads(self, request: Any, context: Context) -> Any:  # noqa: N802
        return self._about.loads(self._front.describe())

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        for part in chunks(await asyncio.to_thread(self._about.tokenizer)):
            yield part

    # --- what it has not ------------------------------------------------------------------------------------------------------

    async def SubscribeKvEvents(self, request: Any, context: Context) -> None:  # noqa: N802
        await _has_not(context, "events of the KV cache; its load is told by GetLoads")

    async def Embed(self, request: Any, context: Context) -> None:  # noqa: N802
        await _has_not(context, "embeddings")

    async def FlushCache(self, request: Any, context: Context) -> None:  # noqa: N802
        await _has_not(context, "a call that empties its caches")

    async def StartProfile(self, request: Any, context: Context) -> None:  # noqa: N802
        await _has_not(context, "a profiler")

    async def StopProfile(self, request: Any, context: Context) -> None:  # noqa: N802
        await _has_not(context, "a profiler")

    async def LoadLoRAAdapter(self, request: Any, context: Context) -> None:  # noqa: N802
        await _has_not(context, "adapters")

    async def UnloadLoRAAdapter(self, request: Any, context: Context) -> None:  # noqa: N802
        await _has_not(context, "adapters")

    async def ListLoadedLoRAAdapters(self, request: Any, context: Context) -> None:  # noqa: N802
        await _has_not(context, "adapters")


async def _end(context: Context, failure: common_pb2.Failure) -> NoReturn:
    status = failure_status(failure)
    await context.abort(status_code(failure.code), status.message, trailing_metadata(status))
    raise AssertionError("abort returns never")


async def _has_not(context: Context, what: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this is a server of Baton, and it has not {what}")
    raise AssertionError("abort returns never")
