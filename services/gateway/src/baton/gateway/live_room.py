"""One request on its way: its legs, its state, its timers, its tokens. Lives on the event loop; every callback is short and none waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
from opentelemetry.trace import Span
from structlog.stdlib import BoundLogger

from baton.gateway.continuation import ended_by
from baton.gateway.errors import GatewayError
from baton.gateway.report import Passage
from baton.gateway.retry import is_chargeable, is_retryable
from baton.gateway.room import Event, Room, State, Verdict
from baton.gateway.room_clock import RoomClock, Timeouts
from baton.gateway.room_failures import FailureScribe, cut_off, waits_for_word
from baton.gateway.tokens import TokenConflictError, TokenMerge, TokenStream
from baton.gateway.worker import ORIGINS, Leg, Worker
from baton.wire.status import code_number, log_reason, origin_name, stage_name, status_code
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

#: A prefill server that rang its doorbell says so at once; one that does not is told to end the room.
SETTLE_S = 5.0

#: Why a server may say that an answer has ended; other reasons are the gateway's own.
_REASONS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)

_EVENTS: dict[Leg, dict[str, Event]] = {
    Leg.PREFILL: {
        "bootstrapped": Event.BOOTSTRAPPED,
        "prefill_started": Event.PREFILL_STARTED,
        "transfer_started": Event.TRANSFER_STARTED,
        "transferred": Event.TRANSFERRED,
    },
    Leg.DECODE: {
        "reserved": Event.RESERVED,
        "prefill_started": Event.PREFILL_STARTED,
        "kv_ready": Event.KV_READY,
        "finished": Event.FINISHED,
    },
    Leg.PLAIN: {"prefill_started": Event.PREFILL_STARTED, "finished": Event.FINISHED},
}


class LiveRoom:
    """Starts both legs, follows them, and ends both as soon as one fails. `on_closed` is called once, when no leg is left."""

    def __init__(
        self,
        room: int,
        starts: Sequence[tuple[Worker, worker_pb2.Start]],
        *,
        passage: Passage,
        timeouts: Timeouts,
        deadline: float | None,
        max_buffered: int,
        log: BoundLogger,
        span: Span,
        on_closed: Callable[[LiveRoom], None],
        fork_of: LiveRoom | None = None,
    ) -> None:
        """deadline: time.monotonic(), seconds. fork_of: the room behind whose prompt this one goes on, on the last of its servers."""
        self.room = room
        self.machine = _machine(starts)
        self.passage = passage
        self.stream = TokenStream(max_buffered)
        self.failure: common_pb2.Failure | None = None
        #: By number of the token in this room's answer; taken out by whoever takes the token.
        self.logprobs: dict[int, inference_pb2.TokenLogprobs] = {}
        #: Of the prompt's tokens behind the first, where they were asked for; whole when the first token comes.
        self.prompt_logprobs: list[inference_pb2.TokenLogprobs] = []
        self.settled = asyncio.Event()
        self.on_failed: Callable[[], None] | None = None
        #: Asked when a server of this room is silent: whether the room is to fail, because another can take its place.
        self.may_leave: Callable[[common_pb2.Failure], bool] | None = None
        self.num_repeated_events = 0
        self._starts = starts
        self._servers = tuple(worker for worker, _ in starts) if fork_of is None else fork_of.servers
        # An answer that was complete before its prompt had landed: others wait for that prompt, and then both legs are ended with this.
        self._once_landed: common_pb2.Failure | None = None
        self._legs: dict[Leg, Worker] = {}
        self._ended: list[Worker] = []  # on which this room's leg ended as it should, or late
        self._sampling = starts[0][1].sampling
        self._wants_logprobs = self._sampling.HasField("top_logprobs")
        self._wants_prompt_logprobs = self._sampling.HasField("prompt_logprobs")
        self._merge = TokenMerge(self._sampling.max_tokens)
        self._finished: worker_pb2.Finished | None = None
        self._scribe = FailureScribe(self.machine, passage.accepted_at, deadline)
        self._clock = RoomClock(timeouts, deadline, on_state_timeout=self._on_state_timeout, on_deadline=self._on_deadline)
        self._log = log
        self._span = span
        self._on_closed = on_closed
        self._answered = False
        self._told_by: Leg | None = None

    # --- life -----------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Sends both starts at once. A worker that cannot take its own fails the room like any other failure."""
        self._clock.start(self.machine.state)
        self._span.add_event(self.machine.state.name)
        for worker, start in self._starts:
            if self.failure is not None:
                break
            try:
                worker.start(start, self)
            except GatewayError as error:
                refused = error.failure()
                refused.origin = ORIGINS[worker.leg]
                self._fail(refused, None)
            else:
                self._legs[worker.leg] = worker
        self._note("info", "room opened", prompt_tokens=len(self._starts[0][1].prompt_token_ids), servers=[w.instance_id for w, _ in self._starts])

    def cancel(self, failure: common_pb2.Failure) -> None:
        """The client or the gateway wants no more of it. Ignored when the answer is complete."""
        if not self._answered:
            self._fail(failure, None)
        elif self._once_landed is not None:
            self._end_legs(failure)

    def answered(self, cause: str) -> None:
        """The gateway has the whole answer (a stop string): the legs that go on are ended. Not a failure."""
        if self._answered or self.failure is not None:
            return
        self._apply(Event.ANSWERED)
        # In its client's name, who wanted no more than this: nobody's failure, on the servers either.
        over = common_pb2.Failure(
            code=code_number(grpc.StatusCode.CANCELLED), origin=common_pb2.ORIGIN_CLIENT, cause=cause, message="the answer is complete"
        )
        if self._starts[-1][1].forks and len(self._starts) == 2 and Event.KV_READY not in self.machine.milestones:
            self._once_landed = over
        self._complete(common_pb2.FINISH_REASON_STOP)
        if self._once_landed is None:
            self._end_legs(over)

    # --- what the workers say -------------------------------------------------------------------------------------------------

    def on_tokens(self, leg: Leg, first: int, tokens: list[int]) -> None:
        if self._answered or self.failure is not None:
            return
        if self._merge.extend(first, tokens):
            self._deliver(tokens)
            return
        for index, token in enumerate(tokens, first):
            try:
                following = self._merge.add(index, token)
            except TokenConflictError as error:
                self._fail(self._scribe.make(grpc.StatusCode.INTERNAL, common_pb2.ORIGIN_TRANSFER, "token_conflict", str(error)), None)
                return
            if following:
                self._deliver(following)

    def on_logprobs(self, index: int, logprobs: inference_pb2.TokenLogprobs) -> None:
        if not self._answered and self.failure is None and self._merge.num_delivered <= index < self._sampling.max_tokens:
            self.logprobs.setdefault(index, logprobs)

    def on_prompt_logprobs(self, first: int, logprobs: Sequence[inference_pb2.TokenLogprobs]) -> None:
        if first == len(self.prompt_logprobs) + 1 and first + len(logprobs) <= self.num_prompt_tokens:
            self.prompt_logprobs += logprobs

    def _lacks_prompt_logprobs(self) -> bool:
        return self._wants_prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def _deliver(self, following: list[int]) -> None:
        if self._merge.num_delivered == len(following) and self._lacks_prompt_logprobs():
            text = f"the first token came with {len(self.prompt_logprobs)} of the prompt's {self.num_prompt_tokens - 1} log probabilities"
            origin = common_pb2.ORIGIN_PREFILL if len(self._starts) == 2 else common_pb2.ORIGIN_DECODE
            self._fail(self._scribe.make(grpc.StatusCode.INTERNAL, origin, "tokens_lost", text), None)
            return
        if self._wants_logprobs:
            end = self._merge.num_delivered
            missing = [index for index in range(end - len(following), end) if index not in self.logprobs]
            if missing:
                text = f"token number {missing[0]} of the answer came without the log probabilities that were asked for"
                origin = common_pb2.ORIGIN_PREFILL if missing[0] == 0 and len(self._starts) == 2 else common_pb2.ORIGIN_DECODE
                self._fail(self._scribe.make(grpc.StatusCode.INTERNAL, origin, "tokens_lost", text), None)
                return
        if self._merge.num_delivered == len(following):
            self._apply(Event.FIRST_TOKEN)
        self.passage.token(time.monotonic(), len(following))
        if not self.stream.push(following):
            text = "the client reads more slowly than the answer is made: more tokens wait for it than --max-buffered-tokens allows"
            self._fail(self._scribe.make(grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.ORIGIN_CLIENT, "slow_reader", text), None)
            return
        self._check_complete()

    def on_event(self, leg: Leg, event: worker_pb2.RoomEvent) -> None:
        kind = event.WhichOneof("event") or "nothing"
        if kind == "failed":
            self._on_failed(leg, self._scribe.of_worker(event.failed, leg))
            return
        known = _EVENTS[leg].get(kind)
        if known is None:
            self._log.warning("event of no meaning ignored", leg=leg.value, kind=kind)
            return
        self._note_details(event, kind)
        self._apply(known)
        if known in (Event.TRANSFERRED, Event.KV_READY, Event.FINISHED):
            self._worker_of(leg).breaker.succeeded()
        if known in (Event.TRANSFERRED, Event.FINISHED):
            self._leg_over(leg)
        if known is Event.KV_READY and self._once_landed is not None:
            self._end_legs(self._once_landed)
        self._check_complete()

    def _on_failed(self, leg: Leg, failure: common_pb2.Failure) -> None:
        cut = cut_off(failure, leg, (worker.leg for worker in self.servers))
        if cut is None:
            self._charge(leg, failure)
            self._leg_failed(leg, failure, leg)
            return
        lost = self._worker_of(cut).cut_off_failure(self._worker_of(leg), failure.message)
        self._leg_failed(leg, self._scribe.of_worker(lost, cut), cut)

    def on_lost(self, leg: Leg, failure: common_pb2.Failure) -> None:
        self._leg_failed(leg, self._scribe.of_worker(failure, leg), leg)

    def on_silent(self, leg: Leg, failure: common_pb2.Failure) -> None:
        whole = self._scribe.of_worker(failure, leg)
        if not self._answered and self.failure is None and self.may_leave is not None and self.may_leave(whole) and not self._only_unsaid():
            self._fail(whole, None)

    @property
    def num_prompt_tokens(self) -> int:
        """Those of the request and, in a room that goes on with an answer, those of the answer so far."""
        return len(self._starts[0][1].prompt_token_ids)

    @property
    def servers(self) -> tuple[Worker, ...]:
        """Prefill first; of a fork those of the room that it goes on behind."""
        return self._servers

    @property
    def told_by(self) -> str:
        """Which server said that the room failed, by its role; "none": the gateway found it itself, or the client left."""
        return "none" if self._told_by is None else self._told_by.value

    @property
    def is_hearsay(self) -> bool:
        """Whether the room's failure is what one of its servers said of the other."""
        others = (ORIGINS[worker.leg] for worker in self.servers if worker.leg is not self._told_by)
        return self._told_by is not None and self.failure is not None and self.failure.origin in others

    # --- inside ---------------------------------------------------------------------------------------------------------------

    def _worker_of(self, leg: Leg) -> Worker:
        return next(worker for worker in self._servers if worker.leg is leg)

    def _charge(self, leg: Leg, failure: common_pb2.Failure) -> None:
        """To the server that says it of itself. What one says of the other is no proof: the other says it too, or its session ends."""
        worker = self._worker_of(leg)
        if failure.origin == ORIGINS[leg] and is_chargeable(failure) and worker.breaker.failed(time.monotonic()):
            worker.counters["breaker_opened"] += 1
            self._log.warning("breaker open", leg=leg.value, worker=worker.instance_id, cause=failure.cause)

    def _note_details(self, event: worker_pb2.RoomEvent, kind: str) -> None:
        if kind == "transferred":
            self.passage.transfer = event.transferred.transfer
        elif kind == "kv_ready":
            self.passage.digest_checked = event.kv_ready.digest_checked
            self.passage.exposed_ms = event.kv_ready.exposed_ms
        elif kind == "prefill_started" and Event.PREFILL_STARTED not in self.machine.milestones:
            self.passage.cached_tokens = event.prefill_started.cached_tokens
        elif kind == "finished":
            self._finished = event.finished

    def _apply(self, event: Event) -> None:
        before = self.machine.state
        verdict = self.machine.apply(event, time.monotonic())
        if verdict is Verdict.REPEATED:
            self.num_repeated_events += 1
        if verdict is Verdict.MOVED:
            self._moved(before)

    def _moved(self, before: State) -> None:
        state = self.machine.state
        self._note("info", "room", state=state.name, before=before.name, at_ms=self._scribe.elapsed_ms)
        self._span.add_event(state.name)
        self._clock.enter(state)

    def _note(self, level: str, event: str, **what: Any) -> None:
        """Logs once what is on its way is on its way: a line takes as long as a write to a client. The order of a room's lines stays."""
        asyncio.get_running_loop().call_soon(partial(getattr(self._log, level), event, **what))

    def _on_state_timeout(self, name: str, allowed_s: float) -> None:
        state = self.machine.state
        text = f"the room stayed in {state.name} for {allowed_s:g} s, which --{name.replace('_', '-')}-s allows; {self._progress()}"
        self._fail(self._scribe.make(grpc.StatusCode.DEADLINE_EXCEEDED, common_pb2.ORIGIN_GATEWAY, name, text, allowed_s), None)

    def _on_deadline(self) -> None:
        text = f"the request's deadline of {self._scribe.allowed_s:.3f} s has passed; {self._progress()}"
        self._fail(self._scribe.make(grpc.StatusCode.DEADLINE_EXCEEDED, common_pb2.ORIGIN_GATEWAY, "deadline", text), None)

    def _progress(self) -> str:
        seen = ", ".join(event.value for event in self.machine.milestones) or "nothing"
        servers = " and ".join(worker.name for worker, _ in self._starts)
        return f"of {servers} it heard: {seen}"

    def _leg_failed(self, leg: Leg, failure: common_pb2.Failure, told_by: Leg) -> None:
        """`leg` is over there; told_by: whose word the failure is.

        Prefill's part is over once decode has the KV cache and the client the first token: what becomes of it then is no failure.
        """
        harmless = leg is Leg.PREFILL and self.machine.state is State.SUCCESS and self._merge.num_delivered > 0
        if harmless or self._answered:
            self._log.info("leg ended late", leg=leg.value, cause=failure.cause)
            self._leg_over(leg)
            return
        if is_retryable(failure) and self._only_unsaid():
            self._log.info("leg ended before it said that the answer is complete", leg=leg.value, cause=failure.cause)
            self._leg_over(leg)
            return
        self._fail(failure, leg, told_by)

    def _only_unsaid(self) -> bool:
        """Whether every token of the answer is here and only the word of it is missing. If so, the room is complete from now on."""
        reason = ended_by(self._sampling, self._merge.tokens)
        if reason is None:
            return False
        self._apply(Event.ANSWERED)
        self._complete(reason)
        return True

    def _leg_over(self, leg: Leg) -> None:
        worker = self._legs.pop(leg, None)
        if worker is not None:
            worker.release(self.room)
            self._ended.append(worker)
        if not self._legs and (self._answered or self.failure is not None):
            self._close()

    def _check_complete(self) -> None:
        """The answer is complete when decode has finished and every token is there. What prefill still owes (the first one) is waited for."""
        if self._finished is None or self._answered or self.failure is not None:
            return
        if self._finished.reason not in _REASONS:
            text = f"the answer has ended for reason number {self._finished.reason}, which this gateway does not know"
            self._fail(self._scribe.make(grpc.StatusCode.INTERNAL, common_pb2.ORIGIN_DECODE, "worker_protocol", text), None)
            return
        missing = self._finished.completion_tokens - self._merge.num_delivered
        if missing <= 0:
            self._complete(self._finished.reason)
        elif Leg.PREFILL not in self._legs or missing > self._merge.num_early + 1:
            text = f"the answer has {self._finished.completion_tokens} tokens, {missing} of them never came"
            origin = common_pb2.ORIGIN_PREFILL if self._merge.num_delivered == 0 and len(self._starts) == 2 else common_pb2.ORIGIN_DECODE
            self._fail(self._scribe.make(grpc.StatusCode.INTERNAL, origin, "tokens_lost", text), None)

    def _complete(self, reason: common_pb2.FinishReason.ValueType) -> None:
        self._answered = True
        self.passage.ended_at = time.monotonic()
        self.stream.end(reason)
        if not self._legs:
            self._close()
            return
        if self._once_landed is None:
            self._clock.after(SETTLE_S, self._on_unsettled)
        else:
            self._clock.stop()

    def _on_unsettled(self) -> None:
        text = f"the answer is complete, this leg has not ended within {SETTLE_S:g} s"
        self._log.warning("leg did not end", legs=[leg.value for leg in self._legs])
        self._end_legs(common_pb2.Failure(code=code_number(grpc.StatusCode.DEADLINE_EXCEEDED), cause="leg_not_ended", message=text))

    def _fail(self, failure: common_pb2.Failure, over: Leg | None, told_by: Leg | None = None) -> None:
        """The first failure ends the room: the client is told, and every leg that is not `over` is aborted."""
        if self._answered or self.failure is not None:
            return
        failure = self._scribe.placed(failure)
        self.failure, self._told_by = failure, told_by
        before = self.machine.state
        moved = self.machine.fail(failure, time.monotonic()) is Verdict.MOVED
        self.passage.ended_at = time.monotonic()
        self._clock.stop()
        self._note(
            "info" if failure.origin == common_pb2.ORIGIN_CLIENT else "warning",
            "room failed",
            state=before.name,
            code=status_code(failure.code).name,
            origin=origin_name(failure.origin),
            stage=stage_name(failure.stage),
            cause=failure.cause,
            elapsed_ms=failure.elapsed_ms,
            allowed_ms=failure.allowed_ms,
            reason=log_reason(failure.cause, failure.message),
        )
        if moved:
            self._span.add_event(State.FAILED.name)
        self.stream.fail(failure)
        if over is not None:
            worker = self._legs.pop(over, None)
            if worker is not None:
                worker.release(self.room)
        if waits_for_word(self._span, failure):
            for worker in self._ended:
                worker.tell_failed(self.room, failure)
        self._end_legs(failure)
        if self.on_failed is not None:
            self.on_failed()

    def _end_legs(self, failure: common_pb2.Failure) -> None:
        told = self._scribe.placed(failure)
        legs, self._legs = self._legs, {}
        for worker in legs.values():
            worker.abort(self.room, told)
        self._close()

    def _close(self) -> None:
        self._clock.close()
        if not self.settled.is_set():
            self.settled.set()
            self._on_closed(self)


def _machine(starts: Sequence[tuple[Worker, worker_pb2.Start]]) -> Room:
    now = time.monotonic()
    if len(starts) == 2:
        return Room.split(now)
    return Room.local(now) if starts[0][0].leg is Leg.DECODE else Room.plain(now)
