"""Sequences that hold pages and are computed step by step: continuous batching, growth and retraction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List

from baton.engine.page_book import PageBook
from baton.engine.scheduling.failures import grammar_fault, not_finite
from baton.engine.scheduling.sequence import NO_LOGPROBS, Limits, Sequence, Slice, StepPlan, land, launch_decodes, told_of_prompts
from baton.engine.types import EngineEvent, Failed, Failure, Finished, Logprobs, Role, Token


class RunningSet:
    """Shared by the decode and the plain role.

    Sequences stand in the order of their requests' admission. When pages run out in mid-stream the youngest gives its pages up and
    waits in `retracted`; later it computes prompt and answer again under the same room, and goes on where it was.

    Steps may be launched before the tokens of the last one are read. A sequence that ends meanwhile is `leaving`: its pages are free only when
    every step that writes into them has run, for the next owner may be a peer that writes without asking this device.

    on_release: told of every sequence that is not computed any more (or not for now, when it is retracted).
    """

    def __init__(self, book: PageBook, limits: Limits, role: Role, on_release: Callable[[Sequence], None] | None = None) -> None:
        self._book = book
        self._limits = limits
        self._role = role
        self._on_release = on_release
        self._leaving: list[Sequence] = []
        self._num_launched = 0
        self._running: list[Sequence] = []
        self._retracted: list[Sequence] = []
        self._tickets: dict[int, int] = {}
        self._next_ticket = 0
        # By fork: pages (from, to) that the next step copies before it writes, and whose the first is.
        self._copies: dict[Sequence, tuple[Sequence, tuple[int, int]]] = {}
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
        """That are the sequences' own."""
        return sum(sequence.num_own_pages for sequence in self._running) + self.num_leaving_pages

    @property
    def num_leaving_pages(self) -> int:
        """Of sequences that ended while a launched step still writes into them."""
        return sum(sequence.num_own_pages for sequence in self._leaving)

    @property
    def num_pending_prompt_tokens(self) -> int:
        """Of prompts, and of what retracted sequences compute again, still to be computed."""
        missing = (sequence.length - sequence.num_computed for sequence in (*self._running, *self._retracted))
        return sum(count for count in missing if count > 1)

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in (*self._running, *self._retracted))

    def counts(self) -> dict[str, float]:
        return {"retractions": self.num_retractions, "recomputed_tokens": self.num_recomputed_tokens}

    def admit(self, sequence: Sequence) -> None:
        """Takes over a sequence whose pages have room for all of its tokens but the last; what of them is not computed yet is computed here."""
        self._tickets[sequence.room] = self._next_ticket
        self._next_ticket += 1
        self._running.append(sequence)

    def fork(self, sequence: Sequence) -> None:
        """Takes in a sequence without pages whose prompt another one has computed: it is given pages as one that comes back is, shares the whole ones
        of the prompt, and copies the last one. Where the other has gone by then, it computes what the tree has not got of it."""
        self._tickets[sequence.room] = self._next_ticket
        self._next_ticket += 1
        sequence.num_scored = sequence.num_prompt  # of its source
        self._retracted.append(sequence)

    def promised_pages(self) -> int:
        """Free pages that are spoken for: growth of what runs, and all that retracted sequences need to come back."""
        if not self._running and not self._retracted:
            return 0
        growth = sum(self._limits.growth_pages(sequence) for sequence in self._running)
        return growth + sum(self._pages_to_run(sequence) for sequence in self._retracted)

    def can_resume(self) -> bool:
        if not self._retracted or len(self._running) >= self._limits.max_running:
            return False
        oldest = self._retracted[0]
        if not self._running:
            return self._book.num_free + self._book.num_held(oldest) >= self._limits.pages_for(len(oldest.tokens))
        growth = sum(self._limits.growth_pages(sequence) for sequence in self._running)
        return self._book.num_free >= growth + self._pages_to_run(oldest)

    def resume(self) -> None:
        """Gives pages back to retracted sequences, oldest first, while what runs keeps room to grow."""
        while self.can_resume():
            sequence = self._retracted.pop(0)
            self._book.admit(sequence, self._limits.pages_for(len(sequence.tokens)), self._limits.headroom(sequence))
            sequence.num_computed = sequence.num_resident
            if sequence.retracted:
                self.num_recomputed_tokens += len(sequence.tokens) - sequence.num_resident
            else:
                self._copy_last_page(sequence)
            self._running.append(sequence)
            self._running.sort(key=self._ticket)

    def plan(self) -> StepPlan:
        """What `resume` let in copies its page in this step or not at all: later the page may be another's."""
        slices, num_decodes = self._slices()
        if not self._copies:
            return StepPlan(tuple(slices), num_decodes=num_decodes)
        pending, self._copies = self._copies, {}
        copies = {sequence: copy for sequence, copy in pending.items() if slices and sequence.pages.num_pages}
        for sequence in pending.keys() - copies.keys():
            sequence.num_computed = sequence.num_resident
        if not copies:
            return StepPlan(tuple(slices), num_decodes=num_decodes)
        sources, pages = zip(*copies.values(), strict=True)
        return StepPlan(tuple(slices), copies=pages, sources=sources, num_decodes=num_decodes)

    def _copy_last_page(self, fork: Sequence) -> None:
        """Of the prompt's last page only the last token is computed again, because its logits give the first token of the answer. If its source has
        lost its pages, the whole page is."""
        source, fork.source = fork.source, None
        if source is None or not source.pages.num_pages or source.num_sure < fork.num_prompt:
            return
        last = fork.num_prompt - 1
        place = last // self._limits.page_size
        self._copies[fork] = source, (source.pages.page(place), fork.pages.page(place))
        fork.num_computed = last

    def _pages_to_run(self, retracted: Sequence) -> int:
        return max(0, self._limits.growth_pages(retracted) - self._book.num_held(retracted))

    def _slices(self) -> tuple[list[Slice], int]:
        """Decode rows first, then chunks of prompts, oldest first, within what the step has left for them; and how many decode rows there are. Grows
        page tables and may retract.

        Empty while pages are short and launched steps are unread: what they draw decides who pays."""
        going, short = self._going()
        if short and not self._grow(going, short):
            return [], 0
        slices: list[Slice] = []
        prompts: list[tuple[Sequence, int]] = []
        for sequence in going:
            missing = len(sequence.tokens) + sequence.num_pending - sequence.num_computed
            if missing == 1:
                slices.append(sequence.next_token())
            elif missing > 1:
                prompts.append((sequence, missing))
        del slices[self._limits.max_running :]
        num_decodes = len(slices)
        budget = self._limits.prompt_budget(num_decodes)
        for sequence, missing in prompts:
            if budget:
                count = min(missing, budget)
                budget -= count
                slices.append(sequence.slice(count, samples=count == missing))
        return slices, num_decodes

    def _going(self) -> tuple[list[Sequence], deque[Sequence]]:
        """Sequences that the next step may compute: those whose tokens are all read, and those that run ahead and are not about to end. And those of
        them that lack pages for their tokens."""
        longest, size = self._limits.max_model_len, self._limits.page_size
        going: list[Sequence] = []
        short: deque[Sequence] = deque()
        for sequence in self._running:
            length = len(sequence.tokens) + sequence.num_pending
            if sequence.num_pending and not (sequence.runs_ahead and length < sequence.last_length and length < longest):
                continue
            going.append(sequence)
            if length > sequence.pages.num_pages * size:
                short.append(sequence)
        return going, short

    def advance(self, plan: StepPlan) -> None:
        """It is being launched."""
        self._num_launched += 1
        for source in plan.sources:
            source.num_in_flight += 1
        launch_decodes(plan.slices[: plan.num_decodes])
        for piece in plan.slices[plan.num_decodes :]:
            piece.sequence.launch(piece.count, piece.samples)

    def resolve(self, plan: StepPlan, drawn: List[int | None], logprobs: Mapping[int, Logprobs] = NO_LOGPROBS) -> list[EngineEvent]:
        """The oldest launched plan has run. `drawn`: one token for each slice that samples, in order; None where the logits were not finite.
        logprobs: told with some of them, by their place in `drawn`."""
        self._num_launched -= 1
        for source in plan.sources:
            source.num_in_flight -= 1
        events: list[EngineEvent] = []
        leaving, place = self._leaving, 0
        over: set[int] = set()
        land(plan.slices)
        for piece in plan.slices:
            if not piece.samples:
                continue
            told = logprobs.get(place) if logprobs else None
            if (not leaving or piece.sequence not in leaving) and not self._take(piece, drawn[place], told, events):
                over.add(piece.sequence.room)
            place += 1
        if over:
            self._drop(over)
        self._let_go()
        return events

    def score(self, scored: List[tuple[Slice, list[Logprobs]]]) -> list[EngineEvent]:
        """What launched slices have found of prompts."""
        return told_of_prompts(scored, lambda sequence: sequence not in self._leaving)

    def drop(self, room: int) -> None:
        """Forgets the room; its pages are free as soon as no launched step writes into them."""
        self._drop({room})
        self._let_go()

    def _take(self, piece: Slice, token: int | None, logprobs: Logprobs | None, events: list[EngineEvent]) -> bool:
        """Adds to `events` what the drawn token means. Whether the sequence goes on."""
        sequence = piece.sequence
        if token is None:
            events.append(Failed(sequence.room, self._fault(sequence)))
            return False
        start, num_prompt, tokens = piece.start, sequence.num_prompt, sequence.tokens
        sequence.num_sure = start + piece.count
        if start < num_prompt:
            self._book.keep(sequence, sequence.num_sure)
        events.append(Token(sequence.room, len(tokens) - num_prompt, token, logprobs))
        tokens.append(token)
        reason = sequence.finish_reason(self._limits.max_model_len)
        if reason is None:
            return True
        events.append(Finished(sequence.room, reason, sequence.num_answered))
        return False

    def _fault(self, sequence: Sequence) -> Failure:
        """Why no token could be drawn."""
        if (fault := grammar_fault(sequence.request)) is not None:
            return fault
        sequence.num_sure = 0
        self._book.damaged(sequence)
        return not_finite(self._role)

    def _drop(self, rooms: set[int]) -> None:
        for sequence in (*self._running, *self._retracted):
            if sequence.room in rooms:
                self._release(sequence)
                self._leaving.append(sequence)
                del self._tickets[sequence.room]
        self._running = [sequence for sequence in self._running if sequence.room not in rooms]
        self._retracted = [sequence for sequence in self._retracted if sequence.room not in rooms]

    def _let_go(self) -> None:
        if self._leaving:
            for sequence in self._leaving:
                if not sequence.num_in_flight:
                    self._give_back(sequence)
            self._leaving = [sequence for sequence in self._leaving if sequence.num_in_flight]

    def _give_back(self, sequence: Sequence) -> None:
        """Its pages; what was computed for sure may be found again, the answer's too."""
        self._book.keep(sequence, sequence.num_sure)
        self._book.release(sequence)
        sequence.num_sure = sequence.num_computed = 0

    def _release(self, sequence: Sequence) -> None:
        if self._on_release is not None:
            self._on_release(sequence)

    def _ticket(self, sequence: Sequence) -> int:
        return self._tickets[sequence.room]

    def _grow(self, going: list[Sequence], short: deque[Sequence]) -> bool:
        """Those of `going` that are `short` get pages for all of their tokens, oldest first; the youngest of all pays when there are none.

        False: pages are short, but who pays is known only when the launched steps are read."""
        while short:
            sequence = short[0]
            missing = self._limits.pages_for(sequence.length) - sequence.pages.num_pages
            if self._book.grow(sequence, missing, self._limits.headroom(sequence)):
                short.popleft()
            elif self._num_launched:
                return False
            else:
                youngest = going.pop()
                if youngest is short[-1]:
                    short.pop()
                self._running.remove(youngest)
                self._retract(youngest)
        return True

    def _retract(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._give_back(sequence)
        sequence.retracted = True
        self.num_retractions += 1
        self._retracted.append(sequence)
        self._retracted.sort(key=self._ticket)
