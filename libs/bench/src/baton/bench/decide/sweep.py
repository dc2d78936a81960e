"""The measurement: all topologies in turns, each looking for its own limit, then the contenders again around theirs."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from baton.bench.decide.cells import CellPlan, CellSetting, measure_cell, met
from baton.bench.decide.record import Cell, DecideRecord, Phase, Topology
from baton.bench.decide.search import RateGrid, RateSearch
from baton.bench.errors import require
from baton.bench.generator import counting
from baton.bench.numbers import plain
from baton.bench.sample import Sample
from baton.bench.targets import Target

#: A cell at a low rate may take so many times its seconds to have enough requests, and has at least so many.
STRETCH, FEWEST = 3, 8
#: Part of the attainment. Two cells of which less than this part was good are no mood of the machine; one may be.
FAR = 0.5


@dataclass(frozen=True)
class SweepPlan:
    """`cell_s`: seconds over which a cell's requests arrive; up to three times as many for `min_requests` at a low rate, and never fewer than 8
    requests. `num_repeats`: rounds of repeats around the limits.

    `budget_s`: no round is begun that would likely end later than this after the first cell; the first round always is."""

    grid: RateGrid
    cell_s: float = 60.0
    min_requests: int = 20
    num_repeats: int = 3
    budget_s: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.cell_s > 0, "cell_s", self.cell_s, "above 0")
        require(self.min_requests >= 1, "min_requests", self.min_requests, "at least 1")
        require(self.num_repeats >= 0, "num_repeats", self.num_repeats, "at least 0")

    def num_requests(self, rate_rps: float) -> int:
        wanted = max(self.min_requests, round(rate_rps * self.cell_s))
        return max(FEWEST, min(wanted, round(rate_rps * STRETCH * self.cell_s)))


class Progress(Protocol):
    """Shows a step of `total` requests until its context ends."""

    def __call__(self, text: str, total: int) -> AbstractContextManager[Callable[[int], None]]: ...


Keep = Callable[[DecideRecord], object]
MeasureCell = Callable[[CellPlan, Target, CellSetting, float, Callable[[Sample], None]], Awaitable[Cell]]


class Sweep:
    """One use. `keep` gets the record after every cell, so that a run that is stopped leaves what it had."""

    def __init__(
        self,
        plan: SweepPlan,
        record: DecideRecord,
        targets: Mapping[str, Target],
        setting: CellSetting,
        progress: Progress,
        keep: Keep,
        measure: MeasureCell = measure_cell,
    ) -> None:
        self._plan, self._targets, self._setting = plan, targets, setting
        self._progress, self._keep, self._measure = progress, keep, measure
        self.record = record
        self._searches = {topology.name: RateSearch(plan.grid) for topology in record.topologies}
        self._start_s = time.perf_counter()
        self._round = 0

    async def run(self) -> DecideRecord:
        while proposals := self._proposals():
            if not self._fits([place for _, place, _ in proposals]):
                self._note(f"the search was cut short after {self._plan.budget_s:g} s (--budget-s): limits are less certain")
                return self.record
            await self._one_round(proposals)
        for _ in range(self._plan.num_repeats):
            again = self._second_looks()
            if not self._fits([place for _, place, _ in again]):
                self._note(f"another round of repeats did not fit into {self._plan.budget_s:g} s (--budget-s)")
                return self.record
            await self._one_round(again)
        return self.record

    def _note(self, text: str) -> None:
        self.record = replace(self.record, notes=(*self.record.notes, text))

    def _proposals(self) -> list[tuple[str, int, Phase]]:
        """Where the limit of a topology that cannot win lies exactly is not looked for: repeats tell more."""
        found: list[tuple[str, int, Phase]] = []
        for name, search in self._searches.items():
            place = search.proposal()
            if place is not None and (not search.is_bracketed or self._may_win(search)):
                found.append((name, place, "bisect" if search.is_bracketed else "bracket"))
        return found

    def _second_looks(self) -> list[tuple[str, int, Phase]]:
        """Who may still win, on both sides of its limit; the others under the load that the best carries: was it chance that they broke there? Not
        again where they were far from carrying it."""
        best, contenders = self._best(), self.contenders()
        looks: list[tuple[str, int, Phase]] = []
        for name, search in self._searches.items():
            if name in contenders or best is None:
                looks += [(name, place, "repeat") for place in search.edges]
            elif not self._is_far_from(name, best):
                looks.append((name, best, "repeat"))
        return looks

    def _is_far_from(self, name: str, place: int) -> bool:
        """Whether it was seen twice to serve less than FAR of what the objectives want under that load, taken together."""
        there = [cell for cell in self.record.cells_of(name) if cell.rate_rps == self._plan.grid.rate_rps(place)]
        return len(there) > 1 and not met(there, FAR * self._setting.targets.attainment)

    def contenders(self) -> list[str]:
        """The best split, and whoever may still be as good as the best."""
        names = [name for name, search in self._searches.items() if self._may_win(search)]
        splits = [topology for topology in self.record.topologies if topology.kind == "split"]
        names += [self._best_of(splits)] if splits else []
        return [topology.name for topology in self.record.topologies if topology.name in names]

    def _may_win(self, search: RateSearch) -> bool:
        best = self._best()
        return best is None or search.high is None or search.high >= best

    def _best(self) -> int | None:
        """The highest load that anyone has carried so far."""
        return max((search.low for search in self._searches.values() if search.low is not None), default=None)

    def _best_of(self, topologies: Sequence[Topology]) -> str:
        def low(topology: Topology) -> float:
            found = self._searches[topology.name].low
            return float("-inf") if found is None else found

        return max(topologies, key=low).name

    def _fits(self, places: Sequence[int]) -> bool:
        """Judged by how long the cells so far took beyond their arrivals."""
        if not self.record.cells:
            return True
        spent_s = time.perf_counter() - self._start_s
        stretch = spent_s / sum(cell.num_requests / cell.rate_rps for cell in self.record.cells)
        expected_s = sum(self._plan.num_requests(rate) / rate for rate in map(self._plan.grid.rate_rps, places)) * stretch
        return bool(places) and spent_s + expected_s <= self._plan.budget_s

    async def _one_round(self, turns: Sequence[tuple[str, int, Phase]]) -> None:
        """Every other round backwards, so that none is always the first."""
        for name, place, phase in turns if self._round % 2 == 0 else list(reversed(turns)):
            cell = await self._one_cell(name, place, phase)
            if phase != "repeat":
                self._searches[name].note(place, met=met([cell], self._setting.targets.attainment))
        self._round += 1

    async def _one_cell(self, name: str, place: int, phase: Phase) -> Cell:
        rate_rps, number = self._plan.grid.rate_rps(place), len(self.record.cells)
        plan = CellPlan(number, name, phase, self._round, rate_rps, self._plan.num_requests(rate_rps), self._plan.seed + self._round)
        begun_s = time.perf_counter() - self._start_s
        with self._progress(f"{phase} {self._round + 1}: {name} at {plain(rate_rps)} requests/s", plan.num_requests) as step:
            cell = await self._measure(plan, self._targets[name], self._setting, begun_s, counting(step))
        self.record = self.record.with_cell(cell)
        self._keep(self.record)
        return cell
