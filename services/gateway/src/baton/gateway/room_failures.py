"""What a failure says of itself: whoever makes one knows why; who ended which room, where, after how long and of how much is filled in here."""

from __future__ import annotations

import time
from collections.abc import Iterable

import grpc
from opentelemetry.trace import Span

from baton.gateway.errors import sendable
from baton.gateway.room import Room
from baton.gateway.worker import ORIGINS, Leg
from baton.wire.status import code_number
from baton.wire.v1 import common_pb2

#: Of a cause, which is a word: a server's may be any text.
MAX_CAUSE_CHARS = 64


def cut_off(failure: common_pb2.Failure, told_by: Leg, legs: Iterable[Leg]) -> Leg | None:
    """Which server of a room has lost this gateway, if that is what `told_by` says of the room's end.

    It says so over a session that lives, so the gateway is not lost: it is the other server whose session with it is cut, and who told this one.
    Of a room on one server, its own.
    """
    if (failure.origin, failure.cause) != (common_pb2.ORIGIN_GATEWAY, "gateway_lost"):
        return None
    return next((leg for leg in legs if leg is not told_by), told_by)


def waits_for_word(span: Span, failure: common_pb2.Failure) -> bool:
    """Whether servers whose legs of a room had ended before it failed keep spans that they send only if they are told: of a trace that is recorded
    and not sampled."""
    return failure.origin != common_pb2.ORIGIN_CLIENT and span.is_recording() and not span.get_span_context().trace_flags.sampled


class FailureScribe:
    """Of one room. Times count from the request's acceptance; where no tighter limit was broken, what is allowed is the request's whole time."""

    def __init__(self, machine: Room, accepted_at: float, deadline: float | None) -> None:
        """accepted_at, deadline: time.monotonic(), seconds."""
        self._machine = machine
        self._accepted_at = accepted_at
        self._allowed_s = 0.0 if deadline is None else deadline - accepted_at

    @property
    def elapsed_ms(self) -> float:
        return round((time.monotonic() - self._accepted_at) * 1e3, 3)

    def make(
        self, code: grpc.StatusCode, origin: common_pb2.Origin.ValueType, cause: str, message: str, allowed_s: float | None = None
    ) -> common_pb2.Failure:
        """One that the gateway itself decides on."""
        return self.placed(
            common_pb2.Failure(
                code=code_number(code), origin=origin, cause=cause, message=message, allowed_ms=0 if allowed_s is None else round(allowed_s * 1e3)
            )
        )

    def stayed_too_long(self, timeout: str, allowed_s: float, servers: str) -> common_pb2.Failure:
        """timeout: name of the setting that bounds the state. servers: those that were asked, in words."""
        flag = f"--{timeout.replace('_', '-')}-s"
        text = f"the room stayed in {self._machine.state.name} for {allowed_s:g} s, which {flag} allows; {self._progress(servers)}"
        return self.make(grpc.StatusCode.DEADLINE_EXCEEDED, common_pb2.ORIGIN_GATEWAY, timeout, text, allowed_s)

    def past_deadline(self, servers: str) -> common_pb2.Failure:
        text = f"the request's deadline of {self._allowed_s:.3f} s has passed; {self._progress(servers)}"
        return self.make(grpc.StatusCode.DEADLINE_EXCEEDED, common_pb2.ORIGIN_GATEWAY, "deadline", text)

    def _progress(self, servers: str) -> str:
        seen = ", ".join(event.value for event in self._machine.milestones) or "nothing"
        return f"of {servers} it heard: {seen}"

    def placed(self, failure: common_pb2.Failure) -> common_pb2.Failure:
        """With stage and times, where whoever made it did not know the room."""
        whole = common_pb2.Failure(
            origin=common_pb2.ORIGIN_GATEWAY,
            stage=self._machine.state.value,
            elapsed_ms=round(self.elapsed_ms),
            allowed_ms=round(self._allowed_s * 1e3),
        )
        whole.MergeFrom(failure)
        return whole

    def of_worker(self, failure: common_pb2.Failure, leg: Leg) -> common_pb2.Failure:
        """A worker's, with what it did not say. The stage is the room's: a worker sees only its half of it. Its words are as many as may be sent.

        Its times, which count from when it heard of the room, are kept only where it broke off at a limit of its own.
        """
        whole = self.make(grpc.StatusCode.UNKNOWN, ORIGINS[leg], "unknown", "")
        elapsed_ms = whole.elapsed_ms
        whole.MergeFrom(failure)
        whole.stage = self._machine.state.value
        whole.cause, whole.message = whole.cause[:MAX_CAUSE_CHARS], sendable(whole.message)
        if not failure.allowed_ms:
            whole.elapsed_ms = elapsed_ms
        return whole
