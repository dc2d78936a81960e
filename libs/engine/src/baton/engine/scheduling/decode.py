"""Decode role: reserve pages, publish them, and run what lands; compute the prompts that are given here to be computed."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass

from baton.engine.errors import DuplicateRoomError
from baton.engine.page_book import PageBook
from baton.engine.ports import Freed, KVImporter, Landed, LandingFailed, Published, Reservation
from baton.engine.scheduling.admission import AdmissionQueue
from baton.engine.scheduling.failures import expired, lease_lost, no_source, no_such_token, refusal
from baton.engine.scheduling.forks import ForkBook
from baton.engine.scheduling.running import RunningSet
from baton.engine.scheduling.sequence import NO_LOGPROBS, Limits, Sequence, Slice, StepPlan
from baton.engine.types import EngineEvent, EngineStats, Failed, Failure, Finished, KVReady, Logprobs, PrefillStarted, Request, Reserved, Role, Token


class Stage(enum.Enum):
    """FORK: waits for another room's prompt; WAITING for pages; RESERVED: handed to the importer; PUBLISHED: the peer may write; ABORTING: ended
    for the client, but a writer may still be at work in its pages; RUNNING: the pages are ours alone."""

    FORK = "fork"
    WAITING = "waiting"
    RESERVED = "reserved"
    PUBLISHED = "published"
    ABORTING = "aborting"
    RUNNING = "running"


#: A peer may write, or is about to be told so.
TRANSFERRING = (Stage.RESERVED, Stage.PUBLISHED)


@dataclass(slots=True)
class Room:
    sequence: Sequence
    stage: Stage = Stage.WAITING


class DecodeScheduler:
    """Pages go FREE -> RESERVED -> PUBLISHED -> running on Landed, and come back from a lease on Landed or Freed only.

    A reservation names the leading tokens that are here already; their pages are shared, and nobody writes into them. What has landed may be found
    by others at once, an answer when it has ended; what has not landed never.

    A local room's pages are never published: they go FREE -> running, and its prompt is computed in chunks beside the decode rows. Nor are a fork's:
    it begins when the prompt of the room that it names has landed (or was computed), and is retracted, ended and counted by itself from then on.
    """

    def __init__(self, book: PageBook, limits: Limits, importer: KVImporter, on_release: Callable[[Sequence], None] | None = None) -> None:
        self._book = book
        self._limits = limits
        self._importer = importer
        self._waiting = AdmissionQueue(limits.max_passes)
        self._running = RunningSet(book, limits, Role.DECODE, on_release)
        self._rooms: dict[int, Room] = {}
        self._events: list[EngineEvent] = []
        self._num_local = 0
        self._forks = ForkBook()

    def add(self, request: Request) -> None:
        if request.room in self._rooms:
            raise DuplicateRoomError(request.room)
        failure = refusal(request, self._limits, Role.DECODE)
        if failure is not None:
            self._events.append(Failed(request.room, failure))
            return
        sequence = Sequence(request, list(request.prompt))
        if request.fork_of:
            self._add_fork(sequence)
            return
        self._rooms[request.room] = Room(sequence)
        self._waiting.push(sequence)

    def abort(self, room: int, failure: Failure) -> None:
        state = self._rooms.get(room)
        if state is None or state.stage is Stage.ABORTING:
            return
        self._events.append(Failed(room, failure))
        if state.stage in TRANSFERRING:
            state.stage = Stage.ABORTING
            self._importer.abort(room, failure)
            return
        self._waiting.remove(room)
        self._forks.remove(room)
        self._running.drop(room)
        del self._rooms[room]

    def reap(self, now: float) -> None:
        for room, state in list(self._rooms.items()):
            transferring = state.stage in TRANSFERRING
            failure = expired(state.sequence.request, now, state.stage is Stage.WAITING, transferring, Role.DECODE)
            if failure is not None:
                self.abort(room, failure)

    def poll(self) -> None:
        for event in self._importer.poll():
            state = self._rooms.get(event.room)
            if state is None:
                continue
            match event:
                case Published():
                    self._published(state)
                case Landed():
                    self._landed(state, event)
                case LandingFailed():
                    self._landing_failed(state, event.failure)
                case Freed():
                    self._freed(state)

    def plan(self) -> StepPlan:
        self._running.resume()
        while (sequence := self._waiting.take(self._admits())) is not None:
            state = self._rooms[sequence.room]
            if sequence.request.local:
                self._start_local(state)
            else:
                self._reserve(state)
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
        """A room that failed before its prompt was here takes its forks with it."""
        for event in self._events if len(self._forks) else ():
            if isinstance(event, Failed):
                for fork in self._forks.take(event.room):
                    del self._rooms[fork.room]
                    self._events.append(Failed(fork.room, event.failure))
        events, self._events = self._events, []
        return events

    def _add_fork(self, fork: Sequence) -> None:
        source = self._rooms.get(fork.request.fork_of)
        if source is None or source.stage is Stage.ABORTING:
            self._events.append(Failed(fork.room, no_source(fork.request.fork_of, Role.DECODE)))
            return
        self._rooms[fork.room] = Room(fork, Stage.FORK)
        self._forks.add(fork)
        if source.sequence.num_answered:
            self._begin_forks(fork.request.fork_of)

    def _begin_forks(self, room: int) -> None:
        """The prompt of `room` is here."""
        for fork in self._forks.take(room):
            fork.source = self._rooms[room].sequence
            self._rooms[fork.room].stage = Stage.RUNNING
            self._running.fork(fork)
            self._events.append(PrefillStarted(fork.room))

    def has_work(self) -> bool:
        if self._events or self._running.num_running or self._running.can_resume():
            return True
        return self._waiting.find(self._admits()) is not None

    def stats(self) -> EngineStats:
        # Most rooms run, and their pages are counted there.
        others = [state for state in self._rooms.values() if state.stage is not Stage.RUNNING]
        held = dict.fromkeys(Stage, 0)
        for state in others:
            held[state.stage] += state.sequence.num_own_pages
        leased = held[Stage.PUBLISHED] + held[Stage.ABORTING]
        quarantined = min(self._importer.quarantined_pages(), leased)
        return EngineStats(
            total_pages=self._book.num_pages,
            free_pages=self._book.num_free,
            cached_pages=self._book.num_free_cached,
            reserved_pages=held[Stage.RESERVED],
            published_pages=leased - quarantined,
            quarantined_pages=quarantined,
            running_pages=self._running.num_pages + self._book.num_shared,
            rooms=len(self._rooms),
            waiting=len(self._waiting),
            running=len(self._running),
            tokens_in_flight=self._running.num_tokens + sum(len(state.sequence.tokens) for state in others if state.stage in TRANSFERRING),
            extra=self._running.counts()
            | self._book.counts()
            | {
                "pending_prompt_tokens": self._pending_prompt_tokens(),
                "local_prefills": self._num_local,
                "in_transfer": sum(state.stage in (*TRANSFERRING, Stage.ABORTING) for state in others),
            },
        )

    def _pending_prompt_tokens(self) -> int:
        waiting = (len(sequence.tokens) for sequence in self._waiting if sequence.request.local)
        return self._running.num_pending_prompt_tokens + sum(waiting)

    def _in_transfer(self) -> list[Room]:
        return [state for state in self._rooms.values() if state.stage in TRANSFERRING]

    def _admits(self) -> Callable[[Sequence], bool]:
        """Whether a sequence may be let in now, counting what runs, what is in transfer and what was retracted."""
        if not self._waiting:
            return _never
        in_transfer = self._in_transfer()
        may_publish = len(in_transfer) < self._limits.max_running
        may_run = len(self._running) < self._limits.max_running
        if not may_publish and not may_run:
            return _never
        promised = self._running.promised_pages() + sum(self._limits.growth_pages(state.sequence) for state in in_transfer)
        fits = self._limits.room_for(self._book.num_free - promised, alone=not in_transfer and not len(self._running))
        return lambda sequence: (may_run if sequence.request.local else may_publish) and fits(sequence)

    def _start_local(self, state: Room) -> None:
        sequence = state.sequence
        self._book.admit(sequence, self._limits.pages_for(sequence.num_prompt), self._limits.headroom(sequence))
        sequence.num_computed = sequence.num_resident
        state.stage = Stage.RUNNING
        self._num_local += 1
        self._events += [
            Reserved(sequence.room, sequence.pages.num_pages, sequence.num_resident),
            PrefillStarted(sequence.room, sequence.num_resident),
        ]
        self._running.admit(sequence)

    def _reserve(self, state: Room) -> None:
        sequence = state.sequence
        self._book.admit(sequence, self._limits.pages_for(sequence.num_prompt), self._limits.headroom(sequence), must_compute=False)
        sequence.num_scored = sequence.num_prompt  # by prefill
        state.stage = Stage.RESERVED
        pages = tuple(sequence.pages.extents)
        reservation = Reservation(sequence.room, pages, sequence.num_prompt, sequence.num_resident, sequence.num_shared_pages)
        self._importer.publish(sequence.request, reservation)

    def _published(self, state: Room) -> None:
        if state.stage is Stage.RESERVED:
            state.stage = Stage.PUBLISHED
            self._events.append(Reserved(state.sequence.room, state.sequence.pages.num_pages, state.sequence.num_resident))

    def _landed(self, state: Room, event: Landed) -> None:
        sequence = state.sequence
        if state.stage is Stage.ABORTING:
            self._release(state)
            return
        self._published(state)
        if not 0 <= event.first_token < self._limits.vocab_size:  # it would be looked up in the next step, and end the engine
            self._events.append(Failed(sequence.room, no_such_token(event.first_token, self._limits.vocab_size)))
            self._release(state)
            return
        state.stage = Stage.RUNNING
        sequence.tokens.append(event.first_token)
        sequence.num_computed = sequence.num_sure = sequence.num_prompt
        self._book.keep(sequence, sequence.num_prompt)
        self._events.append(KVReady(sequence.room, event.digest_checked, event.exposed_s, event.first_token))
        reason = sequence.finish_reason(self._limits.max_model_len)
        if reason is None:
            self._running.admit(sequence)
        self._begin_forks(sequence.room)
        if reason is None:
            return
        self._events.append(Finished(sequence.room, reason, sequence.num_answered))
        self._release(state)

    def _landing_failed(self, state: Room, failure: Failure) -> None:
        if state.stage in TRANSFERRING:
            self._events.append(Failed(state.sequence.room, failure))
            state.stage = Stage.ABORTING

    def _freed(self, state: Room) -> None:
        if state.stage in TRANSFERRING:
            self._events.append(Failed(state.sequence.room, lease_lost(Role.DECODE)))
            state.stage = Stage.ABORTING
        if state.stage is Stage.ABORTING:
            self._release(state)

    def _release(self, state: Room) -> None:
        self._book.release(state.sequence)
        del self._rooms[state.sequence.room]


def _never(_: Sequence) -> bool:
    return False
