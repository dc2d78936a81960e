"""Plain role: prefill and decode of every request in one loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List

from baton.engine.errors import DuplicateRoomError
from baton.engine.page_book import PageBook
from baton.engine.scheduling.admission import AdmissionQueue
from baton.engine.scheduling.failures import expired, no_source, refusal
from baton.engine.scheduling.forks import ForkBook
from baton.engine.scheduling.running import RunningSet
from baton.engine.scheduling.sequence import NO_LOGPROBS, Limits, Sequence, Slice, StepPlan
from baton.engine.types import EngineEvent, EngineStats, Failed, Failure, Finished, Logprobs, PrefillStarted, Request, Role, Token


class PlainScheduler:
    """Prompts in chunks beside the decode rows of the same step."""

    def __init__(self, book: PageBook, limits: Limits, on_release: Callable[[Sequence], None] | None = None) -> None:
        self._book = book
        self._limits = limits
        self._waiting = AdmissionQueue(limits.max_passes)
        self._running = RunningSet(book, limits, Role.PLAIN, on_release)
        self._rooms: dict[int, Sequence] = {}
        self._events: list[EngineEvent] = []
        self._forks = ForkBook()

    def add(self, request: Request) -> None:
        if request.room in self._rooms:
            raise DuplicateRoomError(request.room)
        failure = refusal(request, self._limits, Role.PLAIN)
        if failure is not None:
            self._events.append(Failed(request.room, failure))
            return
        sequence = Sequence(request, list(request.prompt))
        if request.fork_of:
            self._add_fork(sequence)
            return
        self._rooms[request.room] = sequence
        self._waiting.push(sequence)

    def abort(self, room: int, failure: Failure) -> None:
        if self._rooms.pop(room, None) is None:
            return
        self._waiting.remove(room)
        self._forks.remove(room)
        self._running.drop(room)
        self._events.append(Failed(room, failure))

    def reap(self, now: float) -> None:
        waiting = {sequence.room for sequence in self._waiting}
        for room, sequence in list(self._rooms.items()):
            failure = expired(sequence.request, now, False, room in waiting, Role.PLAIN)
            if failure is not None:
                self.abort(room, failure)

    def poll(self) -> None:
        """Nothing comes from outside in this role."""

    def plan(self) -> StepPlan:
        self._running.resume()
        while (sequence := self._waiting.take(self._admits())) is not None:
            self._book.admit(sequence, self._limits.pages_for(len(sequence.tokens)), self._limits.headroom(sequence))
            sequence.num_computed = sequence.num_resident
            self._running.admit(sequence)
            self._events.append(PrefillStarted(sequence.room, sequence.num_resident))
        return self._running.plan()

    def advance(self, plan: StepPlan) -> None:
        self._running.advance(plan)

    def resolve(self, plan: StepPlan, drawn: List[int | None], logprobs: Mapping[int, Logprobs] = NO_LOGPROBS) -> None:
        events = self._running.resolve(plan, drawn, logprobs)
        for event in events:
            if isinstance(event, Token):
                if not event.index:
                    self._begin_forks(event.room)
            elif isinstance(event, (Finished, Failed)):
                del self._rooms[event.room]
        self._events += events

    def score(self, scored: List[tuple[Slice, list[Logprobs]]]) -> None:
        self._events += self._running.score(scored)

    def take_events(self) -> list[EngineEvent]:
        """A room that failed before its prompt was computed takes its forks with it."""
        for event in self._events if len(self._forks) else ():
            if isinstance(event, Failed):
                for fork in self._forks.take(event.room):
                    del self._rooms[fork.room]
                    self._events.append(Failed(fork.room, event.failure))
        events, self._events = self._events, []
        return events

    def _add_fork(self, fork: Sequence) -> None:
        source = self._rooms.get(fork.request.fork_of)
        if source is None:
            self._events.append(Failed(fork.room, no_source(fork.request.fork_of, Role.PLAIN)))
            return
        self._rooms[fork.room] = fork
        self._forks.add(fork)
        if source.num_answered:
            self._begin_forks(source.room)

    def _begin_forks(self, room: int) -> None:
        """The prompt of `room` has been computed."""
        for fork in self._forks.take(room):
            fork.source = self._rooms[room]
            self._running.fork(fork)
            self._events.append(PrefillStarted(fork.room))

    def has_work(self) -> bool:
        if self._events or self._running.num_running or self._running.can_resume():
            return True
        return self._waiting.find(self._admits()) is not None

    def stats(self) -> EngineStats:
        return EngineStats(
            total_pages=self._book.num_pages,
            free_pages=self._book.num_free,
            cached_pages=self._book.num_free_cached,
            running_pages=self._running.num_pages + self._book.num_shared,
            rooms=len(self._rooms),
            waiting=len(self._waiting),
            running=len(self._running),
            tokens_in_flight=self._running.num_tokens,
            extra=self._running.counts() | self._book.counts() | {"pending_prompt_tokens": self._pending_prompt_tokens()},
        )

    def _pending_prompt_tokens(self) -> int:
        return self._running.num_pending_prompt_tokens + sum(len(sequence.tokens) for sequence in self._waiting)

    def _admits(self) -> Callable[[Sequence], bool]:
        """Whether a sequence may be let in now, counting the growth of what runs and what was retracted."""
        if not self._waiting or len(self._running) >= self._limits.max_running:
            return _never
        return self._limits.room_for(self._book.num_free - self._running.promised_pages(), alone=not len(self._running))


def _never(_: Sequence) -> bool:
    return False
