"""What runs on a server that decodes: rows, prompts that are computed in chunks beside them, and who gives way when pages run out."""

from collections.abc import Sequence
from typing import NamedTuple

from baton.bench.plan.job import Job, ServerLimits
from baton.bench.plan.rows import Rows


class StepLoad(NamedTuple):
    """What a step costs by: tokens of prompts and their square, decode rows and the tokens that they attend to."""

    tokens: int
    square: int
    rows: int
    context: int


def square_of(start: int, count: int) -> int:
    """Of a chunk: what its attention costs, so that the chunks of a prompt have the square of its length together."""
    return count * (2 * start + count)


class Seats:
    """Shared by plain and decode servers. Older jobs go first; the youngest pays for missing pages and computes everything again later."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self.rows = Rows(limits)
        self.prompts: list[Job] = []
        self._retracted: list[Job] = []
        self._chunks: list[tuple[Job, int]] = []
        self._next_ticket = 0
        self.num_retractions = 0
        self._most_growth = limits.pages_for(limits.growth_tokens) + 1

    def __len__(self) -> int:
        return len(self.rows) + len(self.prompts) + len(self._retracted)

    @property
    def num_running(self) -> int:
        return len(self.rows) + len(self.prompts)

    def give_ticket(self, job: Job) -> None:
        job.ticket = self._next_ticket
        self._next_ticket += 1

    def start_prompt(self, job: Job) -> None:
        """Its pages are taken here."""
        job.held = self._limits.pages_for(job.length)
        self.rows.free -= job.held
        self.prompts.append(job)

    def growth(self, job: Job, held: int) -> int:
        ahead = min(job.left, self._limits.growth_tokens)
        return max(0, self._limits.pages_for(job.length + ahead) - held)

    def has_room_for(self, needed: int, promised_elsewhere: int = 0) -> bool:
        """Whether `needed` pages are free beside the growth of what runs and was retracted."""
        free = self.rows.free - promised_elsewhere
        if needed + len(self) * self._most_growth <= free and not self._retracted:
            return True
        return needed + self._promised() <= free

    def resume(self) -> None:
        """Gives pages back to retracted jobs, oldest first, while what runs keeps room to grow."""
        while self._retracted and self._can_resume(self._retracted[0]):
            self.start_prompt(self._retracted.pop(0))
            self.prompts.sort(key=lambda job: job.ticket)

    def make_room(self) -> None:
        """Until there is a page for every row's next token."""
        while self.rows.free < self.rows.num_crossing:
            self._retract(max((*self.rows.jobs(), *self.prompts), key=lambda job: job.ticket))

    def plan(self) -> StepLoad | None:
        """Chunks of prompts, oldest first, within the tokens that rows leave; None: nothing to compute.

        A prompt with a single token left is a row like any other, as it is to the engine."""
        if not self.num_running:
            return None
        self._chunks = [(job, 1) for job in self.prompts if job.length - job.computed == 1]
        rows, context = self.rows.num + len(self._chunks), self.rows.context + sum(job.length for job, _ in self._chunks)
        budget, tokens, square = self._limits.prompt_budget(rows), 0, 0
        for job in self.prompts:
            missing = job.length - job.computed
            if missing > 1 and budget > 0:
                count = min(missing, budget)
                budget -= count
                tokens += count
                square += square_of(job.computed, count)
                self._chunks.append((job, count))
        return StepLoad(tokens, square, rows, context)

    def num_steady(self, most: int) -> int:
        """Steps as the one that was planned last, at most `most`."""
        return 1 if self._chunks else self.rows.num_steady(most)

    def advance(self, ends: Sequence[float]) -> list[Job]:
        """The planned steps have ended: who ended with them."""
        ended, now = self.rows.advance(ends), ends[-1]
        for job, count in self._chunks:
            job.computed += count
            if job.computed == job.length:
                self.prompts.remove(job)
                self._draw(job, now, ended)
        self._chunks = []
        return ended

    def _draw(self, job: Job, now: float, ended: list[Job]) -> None:
        if job.first_s < 0:
            job.first_s = now
        else:
            self.rows.loose.append((now, now - job.last_s))
            job.pieces.append(([now], 0, 1))
        job.last_s = now
        job.length += 1
        if job.left:
            self.rows.join(job)
            return
        self.rows.free += job.held
        job.ended_s = now
        ended.append(job)

    def _promised(self) -> int:
        rows, held_by = self.rows.jobs(), self.rows.held_by
        running = sum(self.growth(job, held_by(job)) for job in rows) + sum(self.growth(job, job.held) for job in self.prompts)
        return running + sum(self.growth(job, 0) for job in self._retracted)

    def _can_resume(self, oldest: Job) -> bool:
        if not self.num_running:
            return self.rows.free >= self._limits.pages_for(oldest.length)
        running = sum(self.growth(job, self.rows.held_by(job)) for job in self.rows.jobs()) + sum(self.growth(job, job.held) for job in self.prompts)
        return self.rows.free >= running + self.growth(oldest, 0)

    def _retract(self, job: Job) -> None:
        if job in self.prompts:
            self.prompts.remove(job)
            self.rows.free += job.held
            job.computed = 0
        else:
            self.rows.retract(job)
        self.num_retractions += 1
        self._retracted.append(job)
        self._retracted.sort(key=lambda retracted: retracted.ticket)
