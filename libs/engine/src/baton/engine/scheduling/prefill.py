"""Prefill role: compute prompts in chunks, hand their pages over layer by layer, draw the first token."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass

from baton.engine.errors import DuplicateRoomError
from baton.engine.page_book import PageBook
from baton.engine.ports import ExportEvent, KVExporter, PublishedSlots, SendDone, SendFailed, SendStarted
from baton.engine.scheduling.admission import AdmissionQueue
from baton.engine.scheduling.failures import expired, grammar_fault, not_finite, refusal
from baton.engine.scheduling.sequence import NO_LOGPROBS, Limits, Sequence, Slice, StepPlan, told_of_prompts
from baton.engine.types import (
    Bootstrapped,
    EngineEvent,
    EngineStats,
    Failed,
    Failure,
    Logprobs,
    PrefillStarted,
    Request,
    Role,
    Token,
    Transferred,
    TransferStarted,
    TransferStats,
)

#: A prompt that is computed before decode has said where it goes gets at most one in so many of the free pages.
EARLY_PART = 4


class Stage(enum.Enum):
    """BOOTSTRAPPING: decode's pages are not known, and nothing is computed; WAITING for pages of our own; COMPUTING; SENDING: computed, not yet
    flushed; CLOSING: ended for the client, but the exporter may still read its pages."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING = "waiting"
    COMPUTING = "computing"
    SENDING = "sending"
    CLOSING = "closing"


@dataclass(slots=True)
class Room:
    """handed_pages: leading pages of the prompt that need no (further) hand-over, those resident at decode included. published: decode's pages are
    known. first_token: drawn before that. logprobs: the first token's, where they are asked for."""

    sequence: Sequence
    stage: Stage = Stage.BOOTSTRAPPING
    handed_pages: int = 0
    sending: bool = False
    published: bool = False
    first_token: int | None = None
    logprobs: Logprobs | None = None


class PrefillScheduler:
    """Source pages stay pinned from `exporter.start` until SendDone or SendFailed, whatever happens to the room.

    They may go to the next prompt while a launched step still writes into them: steps run in the order of their launch, so that the next prompt's
    keys and values come after.

    A prefill server with nothing else to do computes one prompt before its decode server has said where the pages go, so that the first token does
    not wait for that conversation. Nothing is said of it until then: a room that decode refuses may still be tried elsewhere.
    """

    def __init__(self, book: PageBook, limits: Limits, exporter: KVExporter) -> None:
        self._book = book
        self._limits = limits
        self._exporter = exporter
        self._waiting = AdmissionQueue(limits.max_passes)
        self._computing: dict[int, Room] = {}
        self._rooms: dict[int, Room] = {}
        self._events: list[EngineEvent] = []
        self._later: list[ExportEvent] = []
        # Of rooms that the next plan begins with: what the prefix tree has of them.
        self._resident: list[tuple[int, int, int]] = []

    def add(self, request: Request) -> None:
        if request.room in self._rooms:
            raise DuplicateRoomError(request.room)
        room = Room(Sequence(request, list(request.prompt)))
        self._rooms[request.room] = room
        self._exporter.expect(request)
        failure = refusal(request, self._limits, Role.PREFILL)
        if failure is not None:
            # Expected and then aborted, so that decode is told at once and does not wait for a timeout.
            self._close(room, failure)

    def abort(self, room: int, failure: Failure) -> None:
        state = self._rooms.get(room)
        if state is not None and state.stage is not Stage.CLOSING:
            self._close(state, failure)

    def reap(self, now: float) -> None:
        for state in list(self._rooms.values()):
            if state.stage is not Stage.CLOSING:
                bootstrapping = not state.published
                waiting = not bootstrapping and not state.sending
                failure = expired(state.sequence.request, now, bootstrapping, waiting, Role.PREFILL)
                if failure is not None:
                    self._close(state, failure)

    def poll_started(self) -> None:
        """In the middle of a forward pass: notes the transfers that have begun, and where those of the computed prompts go. What would move pages or
        rooms waits for `poll`."""
        for event in self._exporter.poll():
            state = self._rooms.get(event.room)
            if isinstance(event, PublishedSlots) and state is not None and state.stage is Stage.COMPUTING:
                self._published(state, event.resident_tokens)
            elif isinstance(event, SendStarted) and state is not None and state.published:
                self._started(state)
            else:
                self._later.append(event)

    def poll(self) -> None:
        later, self._later = self._later, []
        drawn: list[Room] = []
        for event in (*later, *self._exporter.poll()):
            state = self._rooms.get(event.room)
            if state is None:
                continue
            match event:
                case PublishedSlots():
                    self._published(state, event.resident_tokens)
                    drawn += [state] if state.first_token is not None else []
                case SendStarted():
                    self._started(state)
                case SendDone():
                    self._sent(state, event.stats)
                case SendFailed():
                    self._send_failed(state, event.failure)
        for state in drawn:
            if state.stage is Stage.SENDING and state.first_token is not None and self._rooms.get(state.sequence.room) is state:
                self._first_token(state, state.first_token)

    def plan(self) -> StepPlan:
        while (sequence := self._waiting.take(self._fits)) is not None:
            self._start(self._rooms[sequence.room])
        if (early := self._early()) is not None:
            self._start(early)
        slices: list[Slice] = []
        exports: list[tuple[int, int, int]] = []
        resident, self._resident = self._resident, []
        budget = self._limits.max_num_batched_tokens
        for state in self._computing.values():
            if not budget:
                break
            sequence = state.sequence
            missing = sequence.num_prompt - sequence.num_computed
            count = min(missing, budget)
            budget -= count
            slices.append(sequence.slice(count, samples=count == missing))
            exports += self._hand_over(state, sequence.num_computed + count)
        return StepPlan(tuple(slices), tuple(exports), tuple(resident))

    def advance(self, plan: StepPlan) -> None:
        for piece in plan.slices:
            piece.sequence.launch(piece.count, piece.samples)
            if piece.samples:
                self._computing.pop(piece.sequence.room)

    def resolve(self, plan: StepPlan, drawn: List[int | None], logprobs: Mapping[int, Logprobs] = NO_LOGPROBS) -> None:
        tokens = iter(enumerate(drawn))
        for piece in plan.slices:
            piece.sequence.land(piece.samples)
            if not piece.samples:
                continue
            place, token = next(tokens)
            if token is not None:
                self._book.keep(piece.sequence, piece.sequence.num_prompt)
            state = self._rooms.get(piece.sequence.room)
            if state is None or state.sequence is not piece.sequence or state.stage is not Stage.COMPUTING:
                continue  # it ended while its last chunk ran
            if token is None and (fault := grammar_fault(state.sequence.request)) is not None:
                self._close(state, fault)
                continue
            if token is None:
                self._book.damaged(piece.sequence)
                self._close(state, not_finite(Role.PREFILL))
                continue
            state.stage = Stage.SENDING
            state.logprobs = logprobs.get(place)
            if state.published:
                self._first_token(state, token)
            else:
                state.first_token = token

    def score(self, scored: List[tuple[Slice, list[Logprobs]]]) -> None:
        rooms = self._rooms
        self._events += told_of_prompts(scored, lambda each: each.room in rooms and rooms[each.room].stage is Stage.COMPUTING)

    def take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    def has_work(self) -> bool:
        return bool(self._events or self._later or self._computing) or self._waiting.find(self._fits) is not None or self._early() is not None

    def stats(self) -> EngineStats:
        stages = Counter(state.stage for state in self._rooms.values())
        pending = (state.sequence for state in self._rooms.values() if state.stage in (Stage.BOOTSTRAPPING, Stage.WAITING, Stage.COMPUTING))
        return EngineStats(
            total_pages=self._book.num_pages,
            free_pages=self._book.num_free,
            cached_pages=self._book.num_free_cached,
            running_pages=sum(state.sequence.num_own_pages for state in self._rooms.values()) + self._book.num_shared,
            rooms=len(self._rooms),
            waiting=stages[Stage.BOOTSTRAPPING] + stages[Stage.WAITING],
            running=len(self._computing),
            tokens_in_flight=sum(len(state.sequence.tokens) for state in self._rooms.values() if state.sequence.pages.num_pages),
            extra=self._book.counts()
            | {
                "bootstrapping": stages[Stage.BOOTSTRAPPING],
                "in_transfer": stages[Stage.SENDING] + stages[Stage.CLOSING],
                "pending_tokens": sum(sequence.length - sequence.num_computed for sequence in pending),
            },
        )

    def _fits(self, sequence: Sequence) -> bool:
        return len(self._computing) < self._limits.max_running and self._limits.pages_for(sequence.num_prompt) <= self._book.num_free

    def _early(self) -> Room | None:
        """The room whose turn is next, if it may be computed before it is published: only while nothing else is computed or could be, one at a time,
        and in a quarter of the free pages: if decode takes long to publish it, that is what published rooms miss."""
        if self._computing or len(self._waiting) or any(state.sequence.pages.num_pages and not state.published for state in self._rooms.values()):
            return None
        waiting = (state for state in self._rooms.values() if state.stage is Stage.BOOTSTRAPPING)
        first = min(waiting, key=lambda state: state.sequence.request.turn, default=None)
        if first is None or EARLY_PART * self._limits.pages_for(first.sequence.num_prompt) > self._book.num_free:
            return None
        return first

    def _start(self, state: Room) -> None:
        sequence = state.sequence
        self._book.admit(sequence, self._limits.pages_for(sequence.num_prompt))
        sequence.num_computed = sequence.num_resident
        state.stage = Stage.COMPUTING
        self._computing[sequence.room] = state
        self._exporter.start(sequence.room, tuple(sequence.pages.extents), sequence.num_prompt)
        self._resident += self._hand_over(state, sequence.num_resident)
        if state.published:
            self._events.append(PrefillStarted(sequence.room, sequence.num_resident))

    def _first_token(self, state: Room, token: int) -> None:
        state.first_token = None
        self._events.append(Token(state.sequence.room, 0, token, state.logprobs))
        self._exporter.finish(state.sequence.room, token)

    def _hand_over(self, state: Room, num_computed: int) -> list[tuple[int, int, int]]:
        """The pages that become whole with this chunk; the prompt's last page counts as whole when the prompt is."""
        sequence = state.sequence
        whole = num_computed // self._limits.page_size
        if num_computed == sequence.num_prompt:
            whole = self._limits.pages_for(num_computed)
        first, state.handed_pages = state.handed_pages, max(state.handed_pages, whole)
        return [(sequence.room, first, whole - first)] if whole > first else []

    def _published(self, state: Room, resident_tokens: int) -> None:
        if state.published or state.stage is Stage.CLOSING:
            return
        state.published = True
        state.handed_pages = max(state.handed_pages, resident_tokens // self._limits.page_size)
        self._events.append(Bootstrapped(state.sequence.room))
        if state.stage is Stage.BOOTSTRAPPING:
            state.stage = Stage.WAITING
            self._waiting.push(state.sequence)
            return
        self._events.append(PrefillStarted(state.sequence.room, state.sequence.num_resident))

    def _started(self, state: Room) -> None:
        if state.stage is not Stage.CLOSING and not state.sending:
            state.sending = True
            self._events.append(TransferStarted(state.sequence.room))

    def _sent(self, state: Room, stats: TransferStats) -> None:
        if state.stage is Stage.SENDING:
            self._events.append(Transferred(state.sequence.room, stats))
        self._release(state)

    def _send_failed(self, state: Room, failure: Failure) -> None:
        if state.stage is not Stage.CLOSING:
            self._events.append(Failed(state.sequence.room, failure))
        self._release(state)

    def _close(self, state: Room, failure: Failure) -> None:
        """Ends the room for the client; its pages wait for the exporter's last word."""
        state.stage = Stage.CLOSING
        self._waiting.remove(state.sequence.room)
        self._computing.pop(state.sequence.room, None)
        self._events.append(Failed(state.sequence.room, failure))
        self._exporter.abort(state.sequence.room, failure)

    def _release(self, state: Room) -> None:
        self._waiting.remove(state.sequence.room)
        self._computing.pop(state.sequence.room, None)
        self._book.release(state.sequence)
        del self._rooms[state.sequence.room]
