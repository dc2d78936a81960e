"""What both fronts do with a request: check, tokenise, admit, dispatch; then its answer, part by part."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from structlog.stdlib import BoundLogger

from baton.gateway.admission import admit, check_tokens, fitting, longest_prompt
from baton.gateway.answer import AnswerText, Piece
from baton.gateway.attempts import Attempts
from baton.gateway.console.recorder import Recorder
from baton.gateway.dispatch import Dispatcher, Order
from baton.gateway.errors import GatewayError, NotReadyError, OutOfRangeError, RequestError, RoomFailedError, UnknownModelError
from baton.gateway.fleet import Fleet
from baton.gateway.gate import Gate
from baton.gateway.live_room import SETTLE_S, LiveRoom
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.report import room_report
from baton.gateway.requests import MAX_REQUEST_ID_CHARS, InferenceRequest, Prompt, TokenPrompt
from baton.gateway.retry import RetryPolicy
from baton.gateway.sampling import check_ranges
from baton.gateway.shares import Share, Shares
from baton.gateway.tokenizer import PromptTokenizer
from baton.servicekit import get_logger, inject_traceparent, mark_failed
from baton.wire.status import code_number
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

log = get_logger(__name__)


#: What a client gets to take what was already on its way to it when its room failed.
LAST_WORDS_S = 2.0


class _Handler:
    """The task that answers one client.

    When its room has failed, or its time is over, and it is still writing, the client takes nothing: the task is called off.
    """

    def __init__(self, deadline: float) -> None:
        """deadline: time.monotonic(), seconds; for taking the whole answer, which may be complete long before."""
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()) + LAST_WORDS_S, self._evict)
        self._reading: asyncio.TimerHandle | None = None
        self.evicted = False

    def room_failed(self) -> None:
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LAST_WORDS_S, self._evict)

    def watch(self, handed_at: Callable[[], float | None], limit_s: float, on_unread: Callable[[], None]) -> None:
        """Calls the task off when what it was handed last (time.monotonic(), seconds; None: it waits for more) is not written within `limit_s`."""
        since = handed_at()
        left_s = limit_s if since is None else since + limit_s - time.monotonic()
        if left_s <= 0:
            on_unread()
            self._evict()
            return
        self._reading = asyncio.get_running_loop().call_later(left_s, self.watch, handed_at, limit_s, on_unread)

    def _evict(self) -> None:
        if self._task is not None:
            self.evicted = True
            self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()
        if self._reading is not None:
            self._reading.cancel()
        if self.evicted and self._task is not None:
            self._task.uncancel()


class Answer:
    """One answer on its way: iterate for its pieces; once that ends, `finish_reason` and `usage` are set.

    A piece may have tokens and no text yet, or text and no tokens. Iterating raises RoomFailedError when the room fails.
    """

    def __init__(self, request_id: str, prompt_tokens: int, sampling: worker_pb2.Sampling, attempts: Attempts, text: AnswerText) -> None:
        self.request_id = request_id
        self.seed = sampling.seed
        self.usage = inference_pb2.Usage(prompt_tokens=prompt_tokens)
        self.finish_reason: common_pb2.FinishReason.ValueType | None = None
        #: When its reader was given a part and did not ask for the next yet (time.monotonic(), seconds); None: it is waiting for one.
        self.handed_at: float | None = None
        self._attempts = attempts
        self._text = text

    @property
    def ended_by(self) -> str:
        """What made the answer complete: stop_string, stop_token or length; empty while it is not."""
        if self.finish_reason is None:
            return ""
        if self._text.stopped:
            return "stop_string"
        return "stop_token" if self.finish_reason == common_pb2.FINISH_REASON_STOP else "length"

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        self.handed_at = None
        try:
            return await self._next()
        finally:
            self.handed_at = time.monotonic()

    async def _next(self) -> Piece:
        if self.finish_reason is not None:
            raise StopAsyncIteration
        tokens = await self._attempts.take()
        if not tokens:
            return self._end()
        piece = self._text.feed(tokens)
        logprobs = self._attempts.take_logprobs()
        if logprobs:
            piece = replace(piece, logprobs=logprobs[: len(piece.token_ids)])
        self.usage.completion_tokens = self._text.num_tokens
        if self._text.stopped:
            self._attempts.room.answered("stop_string")
            self.finish_reason = common_pb2.FINISH_REASON_STOP
        return piece

    def _end(self) -> Piece:
        reason = self._attempts.room.stream.finish
        assert reason is not None
        rest = self._text.finish(by_stop_token=reason == common_pb2.FINISH_REASON_STOP)
        # The rest of the text may itself complete a stop string.
        self.finish_reason = common_pb2.FINISH_REASON_STOP if self._text.stopped else reason
        return Piece(rest, [])

    async def report(self) -> inference_pb2.RoomReport:
        """How the request passed through the servers. Waits a moment for a leg that has not said how it ended."""
        room = self._attempts.room
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(room.settled.wait(), SETTLE_S + 1.0)
        attempts = self._attempts
        return room_report(room.room, room.machine, room.passage, self.usage, time.monotonic(), attempts.failed, attempts.num_recomputed)


class Inference:
    """The model that this gateway serves."""

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: PromptTokenizer,
        fleet: Fleet,
        dispatcher: Dispatcher,
        gate: Gate,
        shares: Shares,
        request_timeout_s: float,
        unread_timeout_s: float,
        retry_policy: RetryPolicy,
        tracer: trace.Tracer,
        metrics: GatewayMetrics,
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: told of every request when it has ended."""
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.fleet = fleet
        self._dispatcher = dispatcher
        self._gate = gate
        self._shares = shares
        self._request_timeout_s = request_timeout_s
        self._unread_timeout_s = unread_timeout_s
        self._retry_policy = retry_policy
        self._tracer = tracer
        self.metrics = metrics
        self._recorder = recorder

    def models(self) -> list[inference_pb2.Model]:
        """What is served, with the context that the fleet takes now; 0 while no server is there to say it."""
        return [inference_pb2.Model(id=self.model_name, max_model_len=self._context(), vocab_size=self._vocab_size())]

    def check_model(self, name: str) -> None:
        """Raises RequestError, UnknownModelError."""
        if not name:
            raise RequestError("model", f"model is empty; this gateway serves {self.model_name!r}")
        if name != self.model_name:
            raise UnknownModelError(name, self.model_name)

    async def tokenize(self, model: str, prompt: Prompt) -> list[int]:
        """As for an answer, and within the same limit while servers are there to set one. Raises RequestError, PromptTooLongError."""
        self.check_model(model)
        return await self.tokenizer.encode(prompt, longest_prompt(self.fleet.routes) if self.fleet.routes else None)

    async def detokenize(self, model: str, tokens: list[int]) -> str:
        """Special tokens included. Raises RequestError, OutOfRangeError."""
        self.check_model(model)
        check_tokens(tokens, "tokens", self._vocab_size())
        return await self.tokenizer.spell_all(tokens)

    @contextlib.asynccontextmanager
    async def open(self, request: InferenceRequest) -> AsyncIterator[Answer]:
        """Opens a room for the request. Leaving the block ends whatever of it still runs: an error or a cancellation there is the client's leaving.

        Raises RequestError before anything is reserved; NotReadyError, DrainingError, OverloadedError when it cannot be taken now.
        """
        span = self._tracer.start_span("request", context=request.trace, kind=SpanKind.SERVER)
        request_id = request.request_id or f"req-{secrets.token_hex(12)}"
        request_log = _with_trace(log.bind(request_id=request_id), span)
        if request.caller.key_id:
            request_log = request_log.bind(api_key=request.caller.key_id)
        share = Share(self._shares, request.caller)
        try:
            share.begin(time.monotonic())
            answer, attempts = await self._open_room(request, share, request_id, request_log, span)
        except GatewayError as error:
            share.end()
            _note_refusal(error, request_log, span)
            self.metrics.refused(error.cause)
            if self._recorder is not None:
                self._recorder.refused(error)
            raise
        except BaseException as error:
            share.end()
            span.end()
            if isinstance(error, asyncio.CancelledError):
                self.metrics.left_queue()
            raise
        handler = _Handler(self._deadline(request))
        attempts.on_failed = handler.room_failed
        if attempts.over:
            handler.room_failed()
        handler.watch(lambda: answer.handed_at, self._unread_timeout_s, lambda: attempts.room.cancel(_unread(attempts.room, self._unread_timeout_s)))
        try:
            yield answer
        except BaseException as error:
            room = attempts.room
            room.cancel(_why_left(error, room))
            if handler.evicted:
                raise RoomFailedError(room.failure or _not_taken(room)) from error
            raise
        finally:
            handler.close()
            share.end()
            attempts.room.cancel(_client_gone(attempts.room))  # ignored when the answer is complete
            self._note_end(answer, attempts, request_log.bind(room=attempts.room.room), span)
            self.metrics.ended(attempts, answer.usage, answer.ended_by)
            if self._recorder is not None:
                self._recorder.ended(request_id, attempts.room, answer.usage, answer.finish_reason, attempts.failed, attempts.num_recomputed)

    async def _open_room(
        self, request: InferenceRequest, share: Share, request_id: str, request_log: BoundLogger, span: Span
    ) -> tuple[Answer, Attempts]:
        _check_request_id(request.request_id)
        self.check_model(request.model)
        vocab_size = self._vocab_size()
        check_ranges(request.sampling, vocab_size, self._context)
        self._gate.check()
        self._check_ready()  # a prompt's limit is its servers'
        prompt = await self.tokenizer.encode(request.prompt, longest_prompt(self.fleet.routes))
        if isinstance(request.prompt, TokenPrompt):
            check_tokens(prompt, request.prompt.field, vocab_size)
        self._check_ready()  # tokenising may have taken a while
        admitted, _ = admit(prompt, request.prompt.field, request.sampling, self.fleet.routes, self.tokenizer.eos_token_ids)
        share.add_tokens(len(prompt) + admitted.sampling.max_tokens)
        order = Order(
            admitted,
            accepted_at=request.accepted_at,
            deadline=self._deadline(request),
            traceparent=inject_traceparent(trace.set_span_in_context(span)),
            log=request_log,
            span=span,
            cache_salt=request.caller.key_id,
        )
        async with self._gate.place(request.caller, len(prompt), order.deadline) as waited_s:
            if not fitting(admitted, self.fleet.routes):
                raise NotReadyError("the servers that could take it have gone while it waited: " + "; ".join(self.fleet.problems()))
            attempts = Attempts(order, self._dispatcher, self.fleet, self._retry_policy)
        span.set_attribute("baton.queue_ms", round(waited_s * 1e3, 3))
        span.set_attributes({"baton.room": str(attempts.room.room), "baton.request_id": request_id, "baton.prompt_tokens": len(prompt)})
        sampling = admitted.sampling
        text = AnswerText(self.tokenizer.decode, admitted.stop, sampling.stop_token_ids, sampling.min_tokens)
        return Answer(request_id, len(prompt), sampling, attempts, text), attempts

    def _check_ready(self) -> None:
        if not self.fleet.routes:
            raise NotReadyError("no pair of prefill and decode servers and no plain server can be used now: " + "; ".join(self.fleet.problems()))

    def _deadline(self, request: InferenceRequest) -> float:
        own = request.accepted_at + self._request_timeout_s
        return own if request.deadline is None else min(own, request.deadline)

    def _context(self) -> int:
        return max((route.limits.context.num_tokens for route in self.fleet.routes), default=0)

    def _vocab_size(self) -> int:
        """The model's, once a server has said it: it may be padded beyond the tokenizer's."""
        known = [worker.info.vocab_size for worker in self.fleet.workers if worker.info is not None]
        return min(known, default=self.tokenizer.vocab_size)

    @staticmethod
    def _note_end(answer: Answer, attempts: Attempts, room_log: BoundLogger, span: Span) -> None:
        room, passage = attempts.room, attempts.room.passage
        if room.failure is not None:
            span.set_status(StatusCode.ERROR, room.failure.cause)
            if room.failure.origin != common_pb2.ORIGIN_CLIENT:
                mark_failed(span)
        else:
            room_log.info(
                "answered",
                finish=common_pb2.FinishReason.Name(answer.finish_reason or common_pb2.FINISH_REASON_UNSPECIFIED).removeprefix("FINISH_REASON_"),
                prompt_tokens=answer.usage.prompt_tokens,
                completion_tokens=answer.usage.completion_tokens,
                ttft_ms=round(passage.ttft_ms, 3),
                mean_itl_ms=round(passage.mean_itl_ms, 3),
                attempts=attempts.count,
                retried=[attempt.why() for attempt in attempts.failed],
                recomputed_tokens=attempts.num_recomputed,
                prefilled_on_decode=passage.prefilled_on_decode,
            )
        if attempts.failed:
            span.set_attributes({"baton.room": str(room.room), "baton.attempts": attempts.count})
            mark_failed(span)
        span.set_attribute("baton.completion_tokens", answer.usage.completion_tokens)
        span.end()


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise OutOfRangeError("request_id", f"{len(request_id)} characters", f"[0, {MAX_REQUEST_ID_CHARS}] characters")
    if not request_id.isascii() or not request_id.isprintable():
        raise RequestError("request_id", "request_id must be printable ASCII")


def _with_trace(to: BoundLogger, span: Span) -> BoundLogger:
    context = span.get_span_context()
    if not context.is_valid:
        return to
    return to.bind(trace_id=format(context.trace_id, "032x"), span_id=format(context.span_id, "016x"))


def _note_refusal(error: GatewayError, to: BoundLogger, span: Span) -> None:
    to.info("request refused", code=error.code.name, cause=error.cause, reason=str(error))
    span.set_status(StatusCode.ERROR, error.cause)
    span.end()


def _client_gone(room: LiveRoom) -> common_pb2.Failure:
    return common_pb2.Failure(
        code=code_number(grpc.StatusCode.CANCELLED),
        origin=common_pb2.ORIGIN_CLIENT,
        stage=room.machine.state.value,
        cause="client_gone",
        message="the client left before the answer was complete",
    )


def _unread(room: LiveRoom, limit_s: float) -> common_pb2.Failure:
    failure = _client_gone(room)
    failure.code = code_number(grpc.StatusCode.RESOURCE_EXHAUSTED)
    failure.cause = "slow_reader"
    failure.message = f"the client read nothing for {limit_s:g} s (--unread-timeout-s) while a part of its answer waited"
    failure.allowed_ms = round(limit_s * 1e3)
    return failure


def _not_taken(room: LiveRoom) -> common_pb2.Failure:
    failure = _client_gone(room)
    failure.code = code_number(grpc.StatusCode.DEADLINE_EXCEEDED)
    failure.cause = "slow_reader"
    failure.message = "the answer was complete, but the client had not read it by the request's deadline"
    return failure


def _why_left(error: BaseException, room: LiveRoom) -> common_pb2.Failure:
    """Who ended a request whose handler was left by `error`."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit | OSError | GatewayError | grpc.aio.BaseError | asyncio.InvalidStateError):
        return _client_gone(room)
    failure = _client_gone(room)
    failure.code = code_number(grpc.StatusCode.INTERNAL)
    failure.origin = common_pb2.ORIGIN_GATEWAY
    failure.cause = "gateway_error"
    failure.message = f"the gateway failed while it answered: {type(error).__name__}"
    return failure
