"""The prefill half of a split: prompts in chunks, whose pages leave beside the computing."""

from collections.abc import Callable, Sequence

from baton.bench.plan.host import Host
from baton.bench.plan.job import Job
from baton.bench.plan.line import Line
from baton.bench.plan.links import Links
from baton.bench.plan.seats import StepLoad, square_of
from baton.bench.plan.server import Scatter, Stepping, World

#: As the engine's: a prompt that is computed before decode has said where it goes gets at most one in so many of the free pages.
EARLY_PART = 4


class PrefillServer(Stepping):
    """Pages of a prompt are held until its last byte has landed at decode.

    A server with nothing else to do computes one prompt, `_early`, before decode's pages for it are known; it says nothing and moves nothing
    until then.
    """

    def __init__(self, world: World, number: int, host: Host | None, scatters: tuple[Scatter, Scatter], links: Links, factor: float = 1.0) -> None:
        super().__init__(world, number, host, scatters, factor)
        self._links = links
        self._free = world.limits.num_pages
        self._line = Line(world.limits.max_passes)
        self._computing: dict[int, Job] = {}
        self._goals: dict[int, tuple[int, Callable[[Job], None]]] = {}
        self._chunks: list[tuple[Job, int]] = []
        self._num_moving: dict[int, int] = {}
        self._expected: dict[int, Job] = {}
        self._published: list[Job] = []
        self._early: Job | None = None

    def expect(self, job: Job, decode: int, landed: Callable[[Job], None]) -> None:
        """Its request is here. `landed` is called when server `decode` has seen all of its cache."""
        self._goals[job.index] = (decode, landed)
        self._num_moving[job.index] = 0
        self._expected[job.index] = job
        self.wake()

    def publish(self, job: Job) -> None:
        """Decode's pages are known."""
        job.bootstrapped_s = self._clock.now
        if job is self._early and job.computed < job.prompt:
            # A chunk of it is being computed: what was held leaves at once, and this chunk as it is computed.
            self._early = None
            del self._expected[job.index]
            self._send(job, job.computed + sum(count for other, count in self._chunks if other is job))
            return
        self._published.append(job)
        self.wake()

    def _plan(self) -> StepLoad | None:
        self._take_published()
        self._admit()
        self._begin_early()
        if not self._computing:
            return None
        budget, tokens, square = self._limits.max_batched_tokens, 0, 0
        self._chunks = []
        for job in self._computing.values():
            if not budget:
                break
            count = min(job.prompt - job.computed, budget)
            budget -= count
            tokens += count
            square += square_of(job.computed, count)
            self._chunks.append((job, count))
        return StepLoad(tokens, square, 0, 0)

    def _take_published(self) -> None:
        published, self._published = self._published, []
        for job in published:
            del self._expected[job.index]
            if job is not self._early:
                self._line.push(job)
                continue
            self._early = None  # all of it is computed
            self._send(job, job.computed)
            self._draw(job)
            self._sent(job)

    def _begin_early(self) -> None:
        if self._computing or self._line or self._early is not None or not self._expected:
            return
        job = next(iter(self._expected.values()))
        if EARLY_PART * self._limits.pages_for(job.prompt) <= self._free:
            self._early = job
            self._begin(job)

    def _begin(self, job: Job) -> None:
        self._free -= self._limits.pages_for(job.prompt)
        job.started_s = self._clock.now
        self._computing[job.index] = job

    def _draw(self, job: Job) -> None:
        job.first_s = job.last_s = self._clock.now
        job.length += 1

    def _admit(self) -> None:
        while self._line and len(self._computing) < self._limits.max_running:
            job = self._line.take(lambda job: self._limits.pages_for(job.prompt) <= self._free)
            if job is None:
                return
            self._begin(job)

    def _start(self) -> None:
        super()._start()
        if self._busy:
            for job, count in self._chunks:
                if job is not self._early:
                    self._send(job, count)

    def _send(self, job: Job, num_tokens: int) -> None:
        self._num_moving[job.index] += 1
        self._links.begin(self._number, self._goals[job.index][0], job.index, num_tokens)

    def _sent(self, job: Job) -> None:
        self._links.computed(self._number, job.index, lambda: self._moved(job))

    def _num_steady(self, most: int) -> int:
        return 1

    def _finish(self, ends: Sequence[float]) -> None:
        for job, count in self._chunks:
            job.computed += count
            if job.computed == job.prompt:
                del self._computing[job.index]
                if job is not self._early:
                    self._draw(job)
            if job is not self._early:
                self._sent(job)

    def _moved(self, job: Job) -> None:
        self._num_moving[job.index] -= 1
        if self._num_moving[job.index] or job.computed < job.prompt:
            return
        self._free += self._limits.pages_for(job.prompt)
        del self._num_moving[job.index]
        _, landed = self._goals.pop(job.index)
        landed(job)
        self.wake()
