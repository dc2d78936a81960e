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

from baton.gateway.errors import GatewayError
from baton.gateway.legs import Legs
from baton.gateway.report import Passage
from baton.gateway.retry import is_chargeable, is_retryable
from baton.gateway.room import Event, Room, State, Verdict
from baton.gateway.room_answer import BrokenAnswerError, RoomAnswer
from baton.gateway.room_clock import RoomClock, Timeouts
from baton.gateway.room_failures import FailureScribe, cut_off, waits_for_word
from baton.gateway.worker import ORIGINS, Leg, Worker
from baton.wire.status import code_number, log_reason, origin_name, stage_name, status_code
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

#: A prefill server that rang its doorbell says so at once; one that does not is told to end the room.
SETTLE_S = 5.0

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
        self.answer = RoomAnswer(starts[0][1], is_split=len(starts) == 2, max_buffered=max_buffered)
        self.failure: common_pb2.Failure | None = None
        self.settled = asyncio.Event()
        self.on_failed: Callable[[], None] | None = None
        #: Asked when a server of this room is silent: whether the room is to fail, because another can take its place.
        self.may_leave: Callable[[common_pb2.Failure], bool] | None = None
        self.num_repeated_events = 0
        self._starts = starts
        # An answer that was complete before its prompt had landed: others wait for that prompt, and then both legs are ended with this.
        self._once_landed: common_pb2.Failure | None = None
        self._legs = Legs(room, tuple(worker for worker, _ in starts) if fork_of is None else fork_of.servers)
        self._scribe = FailureScribe(self.machine, passage.accepted_at, deadline)
        self._clock = RoomClock(timeouts, deadline, on_state_timeout=self._on_state_timeout, on_deadline=self._on_deadline)
        self._log = log
        self._span = span
        self._on_closed = on_closed
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
                self._legs.begin(worker, start, self)
            except GatewayError as error:
                refused = error.failure()
                refused.origin = ORIGINS[worker.leg]
                self._fail(refused, None)
        self._note("info", "room opened", prompt_tokens=self.num_prompt_tokens, servers=[w.instance_id for w, _ in self._starts])

    def cancel(self, failure: common_pb2.Failure) -> None:
        """The client or the gateway wants no more of it. Ignored when the answer is complete."""
        if not self.answer.is_complete:
            self._fail(failure, None)
        elif self._once_landed is not None:
            self._end_legs(failure)

    def answered(self, cause: str) -> None:
        """The gateway has the whole answer (a stop string): the legs that go on are ended. Not a failure."""
        if self._is_over:
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
        if self._is_over:
            return
        try:
            for following in self.answer.merged(first, tokens):
                self.passage.token(time.monotonic(), len(following))
                try:
                    self.answer.push(following)
                finally:
                    if self.answer.begins_with(following):
                        self._apply(Event.FIRST_TOKEN)  # behind the reader's turn: its write does not wait for a log line
        except BrokenAnswerError as error:
            self._broken(error)
        else:
            self._check_complete()

    def on_logprobs(self, index: int, logprobs: inference_pb2.TokenLogprobs) -> None:
        if not self._is_over:
            self.answer.take_logprobs(index, logprobs)

    def on_prompt_logprobs(self, first: int, logprobs: Sequence[inference_pb2.TokenLogprobs]) -> None:
        self.answer.take_prompt_logprobs(first, logprobs)

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
            self._legs.server(leg).breaker.succeeded()
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
        lost = self._legs.server(cut).cut_off_failure(self._legs.server(leg), failure.message)
        self._leg_failed(leg, self._scribe.of_worker(lost, cut), cut)

    def on_lost(self, leg: Leg, failure: common_pb2.Failure) -> None:
        self._leg_failed(leg, self._scribe.of_worker(failure, leg), leg)

    def on_silent(self, leg: Leg, failure: common_pb2.Failure) -> None:
        whole = self._scribe.of_worker(failure, leg)
        if not self._is_over and self.may_leave is not None and self.may_leave(whole) and not self._only_unsaid():
            self._fail(whole, None)

    @property
    def num_prompt_tokens(self) -> int:
        """Those of the request and, in a room that goes on with an answer, those of the answer so far."""
        return self.answer.num_prompt_tokens

    @property
    def servers(self) -> tuple[Worker, ...]:
        """Prefill first; of a fork those of the room that it goes on behind."""
        return self._legs.servers

    @property
    def told_by(self) -> str:
        """Which server said that the room failed, by its role; "none": the gateway found it itself, or the client left."""
        return "none" if self._told_by is None else self._told_by.value

    @property
    def is_hearsay(self) -> bool:
        """Whether the room's failure is what one of its servers said of the other."""
        others = (ORIGINS[worker.leg] for worker in self.servers if worker.leg is not self._told_by)
        return self._told_by is not None and self.failure is not None and self.failure.origin in others

    @property
    def _is_over(self) -> bool:
        """Whether the client has all that it will get."""
        return self.answer.is_complete or self.failure is not None

    # --- inside ---------------------------------------------------------------------------------------------------------------

    def _charge(self, leg: Leg, failure: common_pb2.Failure) -> None:
        """To the server that says it of itself. What one says of the other is no proof: the other says it too, or its session ends."""
        worker = self._legs.server(leg)
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
            self.answer.finished(event.finished)

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
        self._fail(self._scribe.stayed_too_long(name, allowed_s, self._asked), None)

    def _on_deadline(self) -> None:
        self._fail(self._scribe.past_deadline(self._asked), None)

    @property
    def _asked(self) -> str:
        """The servers that this room has starts for."""
        return " and ".join(worker.name for worker, _ in self._starts)

    def _leg_failed(self, leg: Leg, failure: common_pb2.Failure, told_by: Leg) -> None:
        """`leg` is over there; told_by: whose word the failure is.

        Prefill's part is over once decode has the KV cache and the client the first token: what becomes of it then is no failure.
        """
        harmless = leg is Leg.PREFILL and self.machine.state is State.SUCCESS and self.answer.num_tokens > 0
        if harmless or self.answer.is_complete:
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
        reason = self.answer.ending_unsaid()
        if reason is None:
            return False
        self._apply(Event.ANSWERED)
        self._complete(reason)
        return True

    def _leg_over(self, leg: Leg) -> None:
        self._legs.over(leg)
        if not self._legs and self._is_over:
            self._close()

    def _check_complete(self) -> None:
        """The answer is complete when decode has finished and every token is there. What prefill still owes (the first one) is waited for."""
        if self._is_over:
            return
        try:
            reason = self.answer.ending(first_is_owed=Leg.PREFILL in self._legs)
        except BrokenAnswerError as error:
            self._broken(error)
        else:
            if reason is not None:
                self._complete(reason)

    def _broken(self, error: BrokenAnswerError) -> None:
        self._fail(self._scribe.make(error.code, error.origin, error.cause, str(error)), None)

    def _complete(self, reason: common_pb2.FinishReason.ValueType) -> None:
        self.passage.ended_at = time.monotonic()
        self.answer.complete(reason)
        if not self._legs:
            self._close()
            return
        if self._once_landed is None:
            self._clock.after(SETTLE_S, self._on_unsettled)
        else:
            self._clock.stop()

    def _on_unsettled(self) -> None:
        text = f"the answer is complete, this leg has not ended within {SETTLE_S:g} s"
        self._log.warning("leg did not end", legs=self._legs.names)
        self._end_legs(common_pb2.Failure(code=code_number(grpc.StatusCode.DEADLINE_EXCEEDED), cause="leg_not_ended", message=text))

    def _fail(self, failure: common_pb2.Failure, over: Leg | None, told_by: Leg | None = None) -> None:
        """The first failure ends the room: the client is told, and every leg that is not `over` is aborted."""
        if self._is_over:
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
        self.answer.stream.fail(failure)
        if over is not None:
            self._legs.failed(over)
        if waits_for_word(self._span, failure):
            self._legs.tell_over(failure)
        self._end_legs(failure)
        if self.on_failed is not None:
            self.on_failed()

    def _end_legs(self, failure: common_pb2.Failure) -> None:
        self._legs.abort(self._scribe.placed(failure))
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
