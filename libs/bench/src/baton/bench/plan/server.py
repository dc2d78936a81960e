"""What the three kinds of simulated server have in common: one step at a time, commands taken between steps."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np

from baton.bench.plan.clock import Clock
from baton.bench.plan.costs import Costs
from baton.bench.plan.host import Host
from baton.bench.plan.job import Job, ServerLimits
from baton.bench.plan.seats import StepLoad

#: Draws of a step's jitter that are made at a time.
NUM_DRAWS = 4096
#: Steps that are taken together at most.
MOST_STEPS = 32


@dataclass(frozen=True)
class World:
    """What every server of a simulation shares. `on_ended` is told of every job's end."""

    clock: Clock
    costs: Costs
    limits: ServerLimits
    on_ended: Callable[[Job], None]


class Scatter:
    """Measured over fitted times, drawn anew for every step from their quantiles."""

    def __init__(self, quantiles: tuple[float, ...], draw: np.random.Generator) -> None:
        places = np.linspace(0, 1, len(quantiles))
        values = np.interp(draw.random(NUM_DRAWS), places, quantiles) if len(quantiles) > 1 else np.asarray(quantiles)
        self._values: Iterator[float] = cycle(values.tolist())

    def next(self) -> float:
        return next(self._values)


class Stepping(ABC):
    """Runs steps while there is something to compute. A kind says what a step holds (`_plan`) and what its end means (`_finish`).

    `host` is None for a server with a device of its own. `factor`: what a step costs in this role over its formula."""

    def __init__(self, world: World, number: int, host: Host | None, scatters: tuple[Scatter, Scatter], factor: float) -> None:
        self._world, self._clock, self._limits = world, world.clock, world.limits
        self._number, self._host = number, host
        self._prefill_scatter, self._decode_scatter = scatters
        self._steps, self._factor = world.costs.steps, factor
        self._busy = False
        self._ends: list[float] = []
        self._version = 0
        self._since_s = 0.0
        self.busy_s = 0.0

    def wake(self) -> None:
        """Something came in: an idle server starts a step, a busy one sees it when its present step ends."""
        if not self._busy:
            self._start()
        elif len(self._ends) > 1:
            self._stop_after_present()

    def _start(self) -> None:
        found = self._plan()
        if found is None:
            self._busy = False
            return
        self._busy, self._since_s = True, self._clock.now
        tokens, square, rows, context = found
        scatter = self._prefill_scatter if tokens else self._decode_scatter
        work_s = self._steps.step_s(tokens, square, rows, context) * self._factor * scatter.next()
        if self._host is not None:
            self.busy_s += work_s
            self._host.run(self._number, work_s, has_chunk=tokens > 0, done=self._ended_on_host)
            return
        now = self._clock.now + work_s
        self._ends = [now]
        if not tokens:
            self._look_ahead(now, rows, context)
        self._note()

    def _look_ahead(self, now: float, rows: int, context: int) -> None:
        """Steps that nothing but a wake can change are taken together: one event instead of many."""
        costs, draw, ends = self._steps, self._decode_scatter.next, self._ends
        factor = self._factor * costs.factor_of(rows)
        step_s, token_s = (costs.decode_step_s + costs.decode_row_s * rows) * factor, costs.decode_context_s * factor
        for _ in range(self._num_steady(MOST_STEPS) - 1):
            context += rows
            now += (step_s + token_s * context) * draw()
            ends.append(now)

    def _stop_after_present(self) -> None:
        kept = min(bisect_right(self._ends, self._clock.now) + 1, len(self._ends))
        if kept < len(self._ends):
            del self._ends[kept:]
            self._note()

    def _note(self) -> None:
        self._version += 1
        self._clock.at(self._ends[-1], partial(self._done, self._version))

    def _done(self, version: int) -> None:
        if version == self._version:
            ends, self._ends = self._ends, []
            self.busy_s += ends[-1] - self._since_s
            self._finish(ends)
            self._start()

    def _ended_on_host(self) -> None:
        self._finish([self._clock.now])
        self._start()

    @abstractmethod
    def _num_steady(self, most: int) -> int:
        """Steps without chunks that would be alike, at most `most`."""

    @abstractmethod
    def _plan(self) -> StepLoad | None:
        """The next step; None: nothing to compute."""

    @abstractmethod
    def _finish(self, ends: Sequence[float]) -> None:
        """Steps have run, and ended then: one, or as many alike as `_num_steady` allowed."""
