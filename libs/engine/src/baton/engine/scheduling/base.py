"""The seam between the engine's loop and the three roles."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Protocol

from baton.engine.scheduling.sequence import NO_LOGPROBS, Slice, StepPlan
from baton.engine.types import EngineEvent, EngineStats, Failure, Logprobs, Request


class Scheduler(Protocol):
    """Policy of one role. All calls come from the engine's thread; events pile up until `take_events`."""

    def add(self, request: Request) -> None:
        """Takes a room in, or reports Failed for one that can never fit. Raises DuplicateRoomError."""

    def abort(self, room: int, failure: Failure) -> None:
        """Ends a room with Failed(failure); rooms that are unknown or already ended are ignored."""

    def reap(self, now: float) -> None:
        """Ends every room whose clock has run out; `now` on time.monotonic()."""

    def poll(self) -> None:
        """Takes in what the transfer port has to say."""

    def plan(self) -> StepPlan:
        """Admits what fits and decides what the next step computes. An empty plan: nothing to compute now."""

    def advance(self, plan: StepPlan) -> None:
        """The plan is being launched: the next one is made as if it had run. Several may be under way."""

    def resolve(self, plan: StepPlan, drawn: List[int | None], logprobs: Mapping[int, Logprobs] = NO_LOGPROBS) -> None:
        """The oldest launched plan has run: `drawn` has one token for each slice that samples (None: logits not finite), `logprobs` what is to be
        told with some of them, by their place in it."""

    def score(self, scored: List[tuple[Slice, list[Logprobs]]]) -> None:
        """What the oldest launched plan has found of prompts, before it is resolved."""

    def take_events(self) -> list[EngineEvent]:
        """What happened since the last call, in order."""

    def has_work(self) -> bool:
        """Whether a step would compute or report something now, without word from outside."""

    def stats(self) -> EngineStats:
        """Counts of pages and rooms; the loop adds what it knows itself."""
