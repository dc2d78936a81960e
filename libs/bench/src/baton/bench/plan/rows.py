"""The decode rows of a server: every step gives each of them a token, at a cost that does not grow with their number here."""

import heapq
from collections import deque
from collections.abc import Sequence

from baton.bench.plan.job import Job, ServerLimits


class Rows:
    """Who leaves at which step is known when a row joins, and pages are counted by residues, so a step is a few additions whatever the batch.

    `free`: pages of the pool, shared with whoever else of the server takes pages. `ends`: when each step with rows ended; `rows_in_both`: rows
    that had a token at this end and the one before. `loose`: (when, how long) of gaps that are not between two of these ends."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self.free = limits.num_pages
        self.num = 0
        self.context = 0
        self.ends: list[float] = []
        self.rows_in_both: list[int] = []
        self.loose: list[tuple[float, float]] = []
        self._leaving: dict[int, list[tuple[Job, int]]] = {}
        self._leaving_steps: list[int] = []
        self._residues = [0] * limits.page_size
        self._joined: dict[int, Job] = {}
        self._overflow: deque[Job] = deque()
        self._fresh: dict[int, Job] = {}

    def __len__(self) -> int:
        return self.num + len(self._overflow)

    def jobs(self) -> list[Job]:
        """In no order; `length` of each brought up to date."""
        for job in self._joined.values():
            self._update(job)
        return [*self._joined.values(), *self._overflow]

    def join(self, job: Job) -> None:
        """Its first token is drawn and its prompt's pages are held; past `max_running` it waits for a row to leave."""
        if self.num >= self._limits.max_running:
            self._overflow.append(job)
            return
        step = len(self.ends)
        job.joined_at = step
        self._joined[job.index] = job
        last = step + job.left
        if last not in self._leaving:
            self._leaving[last] = []
            heapq.heappush(self._leaving_steps, last)
        self._leaving[last].append((job, job.epoch))
        self._residues[(1 - job.length + step) % self._limits.page_size] += 1
        self.num += 1
        self._fresh[job.index] = job
        self.context += job.length

    @property
    def num_crossing(self) -> int:
        """Rows whose next token needs a page more."""
        return self._residues[len(self.ends) % self._limits.page_size]

    def num_steady(self, most: int) -> int:
        """Steps that are alike but for the context, at most `most`: until a row leaves, and only while pages cannot run out."""
        if not self.num:
            return 1
        page_size = self._limits.page_size
        steps = min(most, self._leaving_steps[0] - len(self.ends))
        return steps if self.free >= self.num * (steps // page_size + 1) else 1

    def advance(self, ends: Sequence[float]) -> list[Job]:
        """Steps have ended, at most `num_steady` of them: who had the last token with the last of them has left."""
        if not self.num:
            return []
        self.rows_in_both.append(self.num - len(self._fresh))
        self.rows_in_both.extend([self.num] * (len(ends) - 1))
        if self._fresh:
            self.loose.extend((ends[0], ends[0] - job.last_s) for job in self._fresh.values())
            self._fresh.clear()
        self._take_pages(len(ends))
        self.ends.extend(ends)
        self.context += self.num * len(ends)
        ended = []
        if self._leaving_steps[0] == len(self.ends):
            heapq.heappop(self._leaving_steps)
            for job, epoch in self._leaving.pop(len(self.ends)):
                if epoch == job.epoch:
                    self._update(job)
                    self._drop(job, self.held_by(job))
                    job.ended_s = ends[-1]
                    ended.append(job)
        while self._overflow and self.num < self._limits.max_running:
            self.join(self._overflow.popleft())
        return ended

    def _take_pages(self, num_steps: int) -> None:
        """For the next steps' tokens; there must be enough."""
        residues, size, first = self._residues, self._limits.page_size, len(self.ends)
        whole, rest = divmod(num_steps, size)
        self.free -= whole * self.num + sum(residues[(first + step) % size] for step in range(rest))

    def retract(self, job: Job) -> None:
        """Gives its pages up in mid-answer; it will be computed again, answer included."""
        if job.index in self._joined:
            self._update(job)
            self._drop(job, self.held_by(job))
            if self._fresh.pop(job.index, None) is None:
                job.last_s = self.ends[-1]
        else:
            self._overflow.remove(job)
            self.free += self.held_by(job)
        job.epoch += 1
        job.computed = 0

    def held_by(self, job: Job) -> int:
        """Of an up-to-date job: pages for all tokens but the last drawn, which gets its place with the next step."""
        return self._limits.pages_for(job.length - 1)

    def _update(self, job: Job) -> None:
        """Notes the tokens since it joined or was last looked at."""
        step = len(self.ends)
        if step > job.joined_at:
            job.pieces.append((self.ends, job.joined_at, step))
            job.length += step - job.joined_at
            job.joined_at = step

    def _drop(self, job: Job, num_pages: int) -> None:
        # joined_at is the present step and length up to date: the residue is the one it joined with.
        self._residues[(1 - job.length + job.joined_at) % self._limits.page_size] -= 1
        del self._joined[job.index]
        self.num -= 1
        self.context -= job.length
        self.free += num_pages
