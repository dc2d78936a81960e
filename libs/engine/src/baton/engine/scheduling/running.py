"""Sequences that hold pages and are computed step by step: continuous batching, growth and retraction."""

from __future__ import annotations

from collections.abc import Sequence as List

from baton.engine.allocator import PageAllocator
from baton.engine.scheduling.failures import not_finite
from baton.engine.scheduling.sequence import Limits, Sequence, Slice
from baton.engine.types import EngineEvent, Failed, Finished, Role, Token


class RunningSet:
    """Shared by the decode and the plain role.

    Sequences stand in the order of their requests' admission. When pages run out in mid-stream the youngest gives its pages up and
    waits in `retracted`; later it computes prompt and answer again under the same room, and goes on where it was.
    """

    def __init__(self, allocator: PageAllocator, limits: Limits, role: Role) -> None:
        self._allocator = allocator
        self._limits = limits
        self._role = role
        self._running: list[Sequence] = []
        self._retracted: list[Sequence] = []
        self._tickets: dict[int, int] = {}
        self._next_ticket = 0
        self.num_retractions = 0
        self.num_recomputed_tokens = 0

    def __len__(self) -> int:
        """Sequences that are computed or have been retracted."""
        return len(self._running) + len(self._retracted)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_retracted(self) -> int:
        return len(self._retracted)

    @property
    def num_pages(self) -> int:
        return sum(sequence.pages.num_pages for sequence in self._running)

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in (*self._running, *self._retracted))

    def admit(self, sequence: Sequence) -> None:
        """Takes over a sequence whose pages hold at least all of its tokens but the last."""
        self._tickets[sequence.room] = self._next_ticket
        self._next_ticket += 1
        self._running.append(sequence)

    def promised_pages(self) -> int:
        """Free pages that are spoken for: growth of what runs, and all that retracted sequences need to come back."""
        if not self._running and not self._retracted:
            return 0
        return sum(self._limits.growth_pages(sequence) for sequence in (*self._running, *self._retracted))

    def can_resume(self) -> bool:
        if not self._retracted:
            return False
        oldest = self._retracted[0]
        if not self._running:
            return self._allocator.num_free >= self._limits.pages_for(len(oldest.tokens))
        growth = sum(self._limits.growth_pages(sequence) for sequence in self._running)
        return self._allocator.num_free >= growth + self._limits.growth_pages(oldest)

    def resume(self) -> None:
        """Gives pages back to retracted sequences, oldest first, while what runs keeps room to grow."""
        while self.can_resume():
            sequence = self._retracted.pop(0)
            self._allocator.allocate(sequence.pages, self._limits.pages_for(len(sequence.tokens)), self._limits.headroom(sequence))
            self.num_recomputed_tokens += len(sequence.tokens)
            self._running.append(sequence)
            self._running.sort(key=self._ticket)

    def plan(self) -> list[Slice]:
        """Decode rows first, then chunks of prompts, oldest first, within the step's tokens. Grows page tables and may retract."""
        self._grow()
        decoding = [sequence for sequence in self._running if sequence.num_computed == len(sequence.tokens) - 1]
        slices = [Slice(sequence, sequence.num_computed, 1, samples=True) for sequence in decoding[: self._limits.max_running]]
        budget = self._limits.max_num_batched_tokens - len(slices)
        for sequence in self._running:
            missing = len(sequence.tokens) - sequence.num_computed
            if missing > 1 and budget:
                count = min(missing, budget)
                budget -= count
                slices.append(Slice(sequence, sequence.num_computed, count, samples=count == missing))
        return slices

    def commit(self, slices: List[Slice], drawn: List[int | None]) -> list[EngineEvent]:
        """`drawn`: one token for each slice that samples, in order; None where the logits were not finite."""
        events: list[EngineEvent] = []
        tokens = iter(drawn)
        over: set[int] = set()
        for piece in slices:
            sequence = piece.sequence
            sequence.num_computed += piece.count
            if not piece.samples:
                continue
            token = next(tokens)
            if token is None:
                events.append(Failed(sequence.room, not_finite(self._role)))
                over.add(sequence.room)
                continue
            sequence.tokens.append(token)
            events.append(Token(sequence.room, sequence.num_answered - 1, token))
            reason = sequence.finish_reason(self._limits.max_model_len)
            if reason is not None:
                events.append(Finished(sequence.room, reason, sequence.num_answered))
                over.add(sequence.room)
        if over:
            self._drop(over)
        return events

    def drop(self, room: int) -> None:
        """Frees the room's pages and forgets it. Nobody else writes into them: at once."""
        self._drop({room})

    def _drop(self, rooms: set[int]) -> None:
        for sequence in (*self._running, *self._retracted):
            if sequence.room in rooms:
                self._allocator.free(sequence.pages)
                del self._tickets[sequence.room]
        self._running = [sequence for sequence in self._running if sequence.room not in rooms]
        self._retracted = [sequence for sequence in self._retracted if sequence.room not in rooms]

    def _ticket(self, sequence: Sequence) -> int:
        return self._tickets[sequence.room]

    def _grow(self) -> None:
        """Every running sequence gets pages for all of its tokens, oldest first; the youngest pays when there are none."""
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            missing = self._limits.pages_for(len(sequence.tokens)) - sequence.pages.num_pages
            if missing <= 0 or self._allocator.allocate(sequence.pages, missing, self._limits.headroom(sequence)):
                index += 1
            else:
                self._retract(self._running.pop())

    def _retract(self, sequence: Sequence) -> None:
        self._allocator.free(sequence.pages)
        sequence.num_computed = 0
        self.num_retractions += 1
        self._retracted.append(sequence)
        self._retracted.sort(key=self._ticket)
