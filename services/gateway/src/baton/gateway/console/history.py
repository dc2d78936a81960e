"""The requests that have ended, the last few hundred of them, and how many there were. Pure and bounded."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.gateway.console.seconds import Seconds
from baton.gateway.report import Passage
from baton.gateway.retry import FailedAttempt
from baton.gateway.room import Room
from baton.wire.status import origin_name, stage_name
from baton.wire.v1 import common_pb2

NUM_KEPT = 300
#: Failures have places of their own: a flood of successes does not wash them away.
NUM_FAILED_KEPT = 100
#: Causes are words of a bounded set, but workers of another version may have others: one more than these is "other".
MAX_CAUSES = 64
OTHER = ("gateway", "UNSPECIFIED", "other")

Cause = tuple[str, str, str]


@dataclass(slots=True)
class Ended:
    """One request that has ended. Times are the gateway's monotonic clock, in seconds. Nothing of it changes any more."""

    request_id: str
    room: int
    machine: Room
    passage: Passage
    ended_at: float
    prompt_tokens: int
    completion_tokens: int
    finish: common_pb2.FinishReason.ValueType | None
    failure: common_pb2.Failure | None
    attempts: tuple[FailedAttempt, ...] = ()
    num_recomputed: int = 0
    #: Counts all requests of this process, from 1.
    number: int = 0
    #: As it is told, by audience; made when somebody first asks.
    rows: dict[bool, bytes] = field(default_factory=dict)

    @property
    def at_ms(self) -> int:
        return round(self.ended_at * 1e3)


class History:
    """Adding one is a constant amount of work; memory is bounded by NUM_KEPT + NUM_FAILED_KEPT requests and NUM_SECONDS seconds."""

    def __init__(self) -> None:
        self.seconds = Seconds()
        #: (origin, stage, cause) of what failed or was refused -> how many.
        self.causes: Counter[Cause] = Counter()
        self.num_ended = 0
        self.num_failed = 0
        self.num_refused = 0
        self._kept: deque[Ended] = deque(maxlen=NUM_KEPT)
        self._failed: deque[Ended] = deque(maxlen=NUM_FAILED_KEPT)

    def add(self, one: Ended) -> None:
        """Numbers and keeps it."""
        self.num_ended += 1
        one.number = self.num_ended
        (self._kept if one.failure is None else self._failed).append(one)
        if one.failure is not None:
            self.num_failed += 1
            self._count(origin_name(one.failure.origin), stage_name(one.failure.stage), one.failure.cause)
        passage = one.passage
        self.seconds.add(
            int(one.ended_at),
            failed=one.failure is not None,
            num_tokens=one.completion_tokens,
            ttft_ms=passage.ttft_ms,
            itl_ms=passage.mean_itl_ms,
        )

    def refuse(self, failure: common_pb2.Failure) -> None:
        """A request that never got a room."""
        self.num_refused += 1
        self._count(origin_name(failure.origin), "REFUSED", failure.cause)

    def after(self, number: int) -> list[Ended]:
        """What is kept of those behind `number`, oldest first. Looks at no more than it returns."""
        return sorted([*_newer(self._kept, number), *_newer(self._failed, number)], key=lambda one: one.number)

    def _count(self, *cause: str) -> None:
        key: Cause = (cause[0], cause[1], cause[2])
        self.causes[key if key in self.causes or len(self.causes) < MAX_CAUSES else OTHER] += 1


def _newer(kept: deque[Ended], number: int) -> Iterator[Ended]:
    for one in reversed(kept):
        if one.number <= number:
            return
        yield one
