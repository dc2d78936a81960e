"""Servers that decode: the plain one, which also prefills, and the decode half of a split."""

from collections.abc import Callable, Sequence

from baton.bench.plan.host import Host
from baton.bench.plan.job import Job
from baton.bench.plan.line import Line
from baton.bench.plan.seats import Seats, StepLoad
from baton.bench.plan.server import Scatter, Stepping, World


class PlainServer(Stepping):
    """Prompts in chunks beside the decode rows of the same step."""

    def __init__(self, world: World, number: int, host: Host | None, scatters: tuple[Scatter, Scatter], factor: float = 1.0) -> None:
        super().__init__(world, number, host, scatters, factor)
        self.seats = Seats(world.limits)
        self.line = Line(world.limits.max_passes)

    def add(self, job: Job) -> None:
        self.line.push(job)
        self.wake()

    def _plan(self) -> StepLoad | None:
        self.seats.resume()
        self._admit()
        self.seats.make_room()
        return self.seats.plan()

    def _admit(self) -> None:
        while self.line and len(self.seats) < self._limits.max_running:
            job = self.line.take(self._fits)
            if job is None:
                return
            self.seats.give_ticket(job)
            job.started_s = self._clock.now
            self.seats.start_prompt(job)

    def _fits(self, job: Job) -> bool:
        if not len(self.seats):
            return self._limits.pages_for(job.length) <= self.seats.rows.free
        return self.seats.has_room_for(self.seats.growth(job, 0))

    def _num_steady(self, most: int) -> int:
        return self.seats.num_steady(most)

    def _finish(self, ends: Sequence[float]) -> None:
        for job in self.seats.advance(ends):
            self._world.on_ended(job)


class DecodeServer(Stepping):
    """Reserves pages for a prompt that is computed elsewhere, and runs it from the step after its landing."""

    def __init__(self, world: World, number: int, host: Host | None, scatters: tuple[Scatter, Scatter], factor: float = 1.0) -> None:
        super().__init__(world, number, host, scatters, factor)
        self.seats = Seats(world.limits)
        self.line = Line(world.limits.max_passes)
        self._in_transfer: dict[int, Job] = {}
        self._reserving: dict[int, Callable[[Job], None]] = {}
        self._landed: list[Job] = []

    def add(self, job: Job, reserved: Callable[[Job], None]) -> None:
        """`reserved` is called once its pages are held."""
        self._reserving[job.index] = reserved
        self.line.push(job)
        self.wake()

    def land(self, job: Job) -> None:
        """All of its KV cache is there, and its first token drawn."""
        self._landed.append(job)
        self.wake()

    def _plan(self) -> StepLoad | None:
        self._take_landed()
        self.seats.resume()
        self._reserve()
        self.seats.make_room()
        return self.seats.plan()

    def _take_landed(self) -> None:
        landed, self._landed = self._landed, []
        for job in landed:
            del self._in_transfer[job.index]
            job.landed_s = self._clock.now
            if job.left:
                self.seats.give_ticket(job)
                job.last_s = job.first_s
                self.seats.rows.join(job)
            else:
                self.seats.rows.free += self._limits.pages_for(job.prompt)
                job.ended_s = self._clock.now
                self._world.on_ended(job)

    def _reserve(self) -> None:
        while self.line and len(self._in_transfer) < self._limits.max_running:
            job = self.line.take(self._fits)
            if job is None:
                return
            self.seats.rows.free -= self._limits.pages_for(job.prompt)
            self._in_transfer[job.index] = job
            job.reserved_s = self._clock.now
            self._reserving.pop(job.index)(job)

    def _fits(self, job: Job) -> bool:
        if not self._in_transfer and not len(self.seats):
            return self._limits.pages_for(job.prompt) <= self.seats.rows.free
        promised = sum(map(self._growth_in_transfer, self._in_transfer.values()))
        return self.seats.has_room_for(self.seats.growth(job, 0), promised)

    def _growth_in_transfer(self, job: Job) -> int:
        """Its first token may be drawn already; decode does not know it before the landing."""
        ahead = min(job.answer, self._limits.growth_tokens)
        return self._limits.pages_for(job.prompt + ahead) - self._limits.pages_for(job.prompt)

    def _num_steady(self, most: int) -> int:
        return self.seats.num_steady(most)

    def _finish(self, ends: Sequence[float]) -> None:
        for job in self.seats.advance(ends):
            self._world.on_ended(job)
