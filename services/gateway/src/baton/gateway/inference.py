"""What both fronts do with a request: check, tokenise, admit, dispatch; then its answer, part by part."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from structlog.stdlib import BoundLogger

from baton.gateway.admission import Admitted, admit, check_tokens, fitting, longest_prompt
from baton.gateway.answer import AnswerText
from baton.gateway.attempts import Attempts
from baton.gateway.choices import Answer, Choice
from baton.gateway.choices import orders as each_choice
from baton.gateway.client_handler import ClientHandler
from baton.gateway.console.recorder import Recorder
from baton.gateway.dispatch import Dispatcher, Order
from baton.gateway.errors import GatewayError, NotReadyError, OutOfRangeError, RequestError, RoomFailedError, UnknownModelError
from baton.gateway.fleet import Fleet
from baton.gateway.gate import MAX_PRIORITY, Gate
from baton.gateway.leaving import cancel, client_gone, given_up, not_taken, unread, why_left
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.reasoning import ReasoningSplit
from baton.gateway.requests import MAX_REQUEST_ID_CHARS, ChatPrompt, InferenceRequest, Prompt, TokenPrompt
from baton.gateway.retry import RetryPolicy
from baton.gateway.sampling import MAX_ANSWERS, check_ranges
from baton.gateway.shares import Share, Shares
from baton.gateway.split import AnswerSplit
from baton.gateway.structured import GrammarCheck
from baton.gateway.tokenizer import PromptTokenizer
from baton.gateway.tools.parser import parser_of
from baton.servicekit import get_logger, inject_traceparent, mark_failed
from baton.wire.v1 import common_pb2, inference_pb2

log = get_logger(__name__)


class Inference:
    """The model that this gateway serves."""

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: PromptTokenizer,
        grammars: GrammarCheck,
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
        self._grammars = grammars
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
        request_log = _with_trace(log.bind(request_id=request_id) if _wrong_with_id(request_id) is None else log, span)
        if request.caller.key_id:
            request_log = request_log.bind(api_key=request.caller.key_id)
        share = Share(self._shares, request.caller)
        try:
            if (most := request.caller.limits.max_concurrent) is not None:
                _check_number(request, most, "each answer counts against the API key's max_concurrent")
            share.begin(time.monotonic(), request.num_answers)
            answer = await self._open_room(request, share, request_id, request_log, span)
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
        handler = ClientHandler(self._deadline(request))
        every = [choice.attempts for choice in answer.choices]
        for attempts in every:
            attempts.on_failed = handler.room_failed
            if attempts.over:
                handler.room_failed()
        handler.watch(lambda: answer.handed_at, self._unread_timeout_s, lambda: cancel(every, partial(unread, limit_s=self._unread_timeout_s)))
        try:
            yield answer
        except BaseException as error:
            cancel(every, partial(why_left, error))
            if handler.evicted:
                room = answer.telling.attempts.room
                raise RoomFailedError(room.failure or not_taken(room)) from error
            raise
        finally:
            handler.close()
            share.end()
            cancel(every, client_gone)  # ignored when the answer is complete
            self._note_end(answer, request_log, span)
            await answer.close()

    async def _open_room(self, request: InferenceRequest, share: Share, request_id: str, request_log: BoundLogger, span: Span) -> Answer:
        if (wrong := _wrong_with_id(request.request_id)) is not None:
            raise wrong
        self.check_model(request.model)
        vocab_size = self._vocab_size()
        check_ranges(request.sampling, vocab_size, self._context)
        _check_number(request, max(1, self._gate.max_rooms), "each answer takes a room (--max-rooms)")
        if abs(request.priority) > MAX_PRIORITY:
            raise OutOfRangeError("priority", request.priority, f"[{-MAX_PRIORITY}, {MAX_PRIORITY}]")
        self._gate.check()
        prompts: list[list[int]] = []
        for prompt in request.prompts:
            if prompts:
                await asyncio.sleep(0)  # there may be many
            self._check_ready()  # a prompt's limit is its servers'
            prompts.append(await self._encode(prompt, vocab_size))
        await self._grammars.check(request.sampling.structure)
        self._check_ready()  # tokenising may have taken a while
        admitted = [
            admit(prompt, asked.field, request.sampling, self.fleet.routes, self.tokenizer.eos_token_ids)[0]
            for prompt, asked in zip(prompts, request.prompts, strict=True)
        ]
        num_tokens, num_choices = sum(map(len, prompts)), sum(one.num_choices for one in admitted)
        share.add_tokens(num_tokens + sum(one.num_choices * one.sampling.max_tokens for one in admitted))
        order = Order(
            admitted[0],
            accepted_at=request.accepted_at,
            deadline=self._deadline(request),
            traceparent=inject_traceparent(trace.set_span_in_context(span)),
            log=request_log,
            span=span,
            cache_salt=request.caller.key_id,
            priority=request.priority,
        )
        choices: list[Choice] = []
        async with self._gate.place(request.caller, num_tokens, order.deadline, num_choices, request.priority) as waited_s:
            if not all(fitting(one, self.fleet.routes) for one in admitted):
                raise NotReadyError("the servers that could take it have gone while it waited: " + "; ".join(self.fleet.problems()))
            try:
                for one, asked in zip(admitted, request.prompts, strict=True):
                    self._open_choices(replace(order, admitted=one), asked, choices)
            except BaseException:
                cancel([choice.attempts for choice in choices], given_up)
                raise
        room = choices[0].attempts.room
        span.set_attribute("baton.queue_ms", round(waited_s * 1e3, 3))
        span.set_attributes({"baton.room": str(room.room), "baton.request_id": request_id, "baton.prompt_tokens": num_tokens})
        return Answer(request_id, prompts, admitted[0].sampling.seed, choices)

    async def _encode(self, prompt: Prompt, vocab_size: int) -> list[int]:
        ids = await self.tokenizer.encode(prompt, longest_prompt(self.fleet.routes))
        if isinstance(prompt, TokenPrompt):
            check_tokens(ids, prompt.field, vocab_size)
        return ids

    def _open_choices(self, order: Order, prompt: Prompt, choices: list[Choice]) -> None:
        """Adds the answers to one more prompt, a room for each, all at once: the first one's prompt is the others' as well."""
        source = None
        for admitted in each_choice(order.admitted):
            attempts = Attempts(replace(order, admitted=admitted), self._dispatcher, self.fleet, self._retry_policy, fork_of=source)
            source = source or attempts.room
            sampling = admitted.sampling
            decode = self.tokenizer.decode_chat if isinstance(prompt, ChatPrompt) else self.tokenizer.decode
            text = AnswerText(decode, admitted.stop, sampling.stop_token_ids, sampling.min_tokens)
            choices.append(Choice(len(choices), attempts, text, self._split(prompt, admitted), prompt_only=admitted.prompt_only))

    def _split(self, prompt: Prompt, admitted: Admitted) -> AnswerSplit | None:
        """None: the answer is text. One that is held to a grammar is that from its first character on, and thinks nothing before."""
        if not isinstance(prompt, ChatPrompt):
            return None
        dialect = self.tokenizer.dialect
        reasoning = None
        if dialect.thinks and not admitted.sampling.grammar:
            reasoning = ReasoningSplit(begun=self.tokenizer.has_begun_to_think(admitted.prompt))
        calls = parser_of(prompt.offer, dialect.form) if prompt.offer is not None and dialect.form is not None else None
        return AnswerSplit(reasoning, calls) if reasoning is not None or calls is not None else None

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

    def _note_end(self, answer: Answer, to: BoundLogger, span: Span) -> None:
        attempts = answer.telling.attempts
        _log_end(answer, attempts, to.bind(room=attempts.room.room), span)
        self.metrics.ended(attempts, answer.usage, [choice.ended_by for choice in answer.choices])
        if self._recorder is not None:
            room, reason = attempts.room, answer.telling.finish_reason
            self._recorder.ended(answer.request_id, room, answer.usage, reason, attempts.failed, attempts.num_recomputed)


def _check_number(request: InferenceRequest, limit: int, why: str) -> None:
    """Of answers, against a limit that the request would not fit if it were alone. Raises OutOfRangeError."""
    n, num_prompts = request.sampling.n or 1, len(request.prompts)
    if n > limit:
        raise OutOfRangeError(request.sampling.name("n"), n, f"[1, {limit}]", why)
    if num_prompts > 1 and request.num_answers > (most := min(limit, MAX_ANSWERS)):
        found = f"{num_prompts} prompts with {request.num_answers} answers"
        remedy = "send fewer prompts at once"
        raise OutOfRangeError("prompt", found, f"[1, {most}] answers", f"{why}, {remedy}" if limit < MAX_ANSWERS else remedy)


def _log_end(answer: Answer, attempts: Attempts, room_log: BoundLogger, span: Span) -> None:
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


def _wrong_with_id(request_id: str) -> RequestError | None:
    """One that is refused is in no log either."""
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        return OutOfRangeError("request_id", f"{len(request_id)} characters", f"[0, {MAX_REQUEST_ID_CHARS}] characters")
    if not request_id.isascii() or not request_id.isprintable():
        return RequestError("request_id", "request_id must be printable ASCII")
    return None


def _with_trace(to: BoundLogger, span: Span) -> BoundLogger:
    context = span.get_span_context()
    if not context.is_valid:
        return to
    return to.bind(trace_id=format(context.trace_id, "032x"), span_id=format(context.span_id, "016x"))


def _note_refusal(error: GatewayError, to: BoundLogger, span: Span) -> None:
    to.info("request refused", code=error.code.name, cause=error.cause, reason=error.for_log)
    span.set_status(StatusCode.ERROR, error.cause)
    span.end()
