"""How many servers of each kind for a load and its objectives: a search that moves one server at a time, over simulated fleets."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.bench.arrivals import ArrivalOptions
from baton.bench.errors import SettingError, require
from baton.bench.measures import Objectives
from baton.bench.plan.calibration import Calibration
from baton.bench.plan.costs import Costs
from baton.bench.plan.fleet import FleetShape
from baton.bench.plan.load import Lengths, drawn
from baton.bench.plan.outcome import Misses
from baton.bench.plan.predict import Band, Link, Prediction, predict
from baton.bench.plan.simulation import simulate

#: A fleet of more servers is searched for in a part of it, of about so many servers under its part of the load.
CELL_SERVERS = 24
#: Requests at least: in all, for each server, and so many that arrivals go on for so many answers' durations.
MIN_REQUESTS = 3000
MIN_REQUESTS_PER_SERVER = 40
MIN_DURATIONS = 3.0
WARM_UP_SHARE = 0.25
#: Of prefill servers' time. Closer to all of it their queue takes longer to show than a simulation lasts.
MOST_PREFILL_USE = 0.95
MOST_STEPS = 60
#: A cell that misses its objectives with so many servers misses them with any number.
MOST_CELL_SERVERS = 4 * CELL_SERVERS
#: Of a server's time, what a first guess plans to use.
GUESSED_USE = 0.7

Note = Callable[[str], None]


@dataclass(frozen=True)
class Demand:
    """`attainment`: part of the requests that must meet both objectives."""

    lengths: Lengths
    arrivals: ArrivalOptions
    objectives: Objectives
    attainment: float = 0.99

    def __post_init__(self) -> None:
        require(0 < self.attainment < 1, "attainment", self.attainment, "above 0 and below 1")
        require(self.arrivals.name in ("poisson", "gamma"), "arrivals", self.arrivals.name, "poisson or gamma: a fleet is sized for an open loop")

    def part(self, share: float) -> "Demand":
        return replace(self, arrivals=replace(self.arrivals, rate_rps=self.arrivals.rate_rps * share))


@dataclass(frozen=True)
class Sized:
    """`num_plain`, ...: over seeds, of the whole fleet. `confirmed`: the middle fleet, simulated whole under the whole load."""

    kind: str
    num_plain: Band
    num_prefill: Band
    num_decode: Band
    confirmed: Prediction

    @property
    def num_servers(self) -> float:
        return self.confirmed.shape.num_servers

    @property
    def least_servers(self) -> float:
        return self.num_plain.low + self.num_prefill.low + self.num_decode.low

    @property
    def most_servers(self) -> float:
        return self.num_plain.high + self.num_prefill.high + self.num_decode.high


class Sizer:
    """Counts of one kind of fleet, for one demand. `base` gives limits and routing."""

    def __init__(self, calibration: Calibration, base: FleetShape, demand: Demand, link: Link | None = None) -> None:
        self._calibration, self._base, self._demand, self._link = calibration, base, demand, link or Link()
        rows = demand.lengths.rows
        #: Of a request; a guess until a fleet that meets the objectives has been simulated.
        self._duration_s = sum(row[1] for row in rows) / len(rows) * demand.objectives.itl_p99_ms / 2000

    def size(self, *, is_split: bool, num_seeds: int, note: Note) -> Sized:
        """Raises SettingError where no number of servers meets the objectives."""
        self._require_possible(self._costs(0), is_split=is_split)
        first = self._guess(self._costs(0), is_split)
        share = min(1.0, CELL_SERVERS / first.num_servers)
        cell = self._search(self._scaled(first, share), self._demand.part(share), self._costs(0), 0)
        if share < 1 and cell.num_servers < CELL_SERVERS / 2:  # the guess was far off: a server more or less would be too coarse a step
            finer = min(1.0, share * CELL_SERVERS / cell.num_servers)
            cell, share = self._scaled(cell, finer / share), finer
        found: list[FleetShape] = []
        for seed in range(num_seeds):
            cell = self._search(cell, self._demand.part(share), self._costs(seed), seed)
            note(f"{'split' if is_split else 'plain'}, seed {seed + 1} of {num_seeds}: {self._scaled(cell, 1 / share).name}")
            found.append(cell)
        whole = [self._scaled(shape, 1 / share) for shape in found]
        middle = sorted(whole, key=lambda shape: (shape.num_servers, shape.num_prefill))[len(whole) // 2]
        return Sized(
            kind="split" if is_split else "plain",
            num_plain=_band([shape.num_plain for shape in whole]),
            num_prefill=_band([shape.num_prefill for shape in whole]),
            num_decode=_band([shape.num_decode for shape in whole]),
            confirmed=self.confirm(middle, max(1, min(num_seeds, round(5 * CELL_SERVERS / middle.num_servers)))),
        )

    def confirm(self, shape: FleetShape, num_seeds: int) -> Prediction:
        """The whole fleet under the whole load."""
        demand, calibration = self._demand, self._calibration
        num_requests = self._num_requests(shape, demand)
        return predict(
            calibration,
            shape,
            lambda seed: drawn(demand.lengths, demand.arrivals, num_requests, seed),
            num_seeds,
            demand.objectives,
            self._link if shape.is_split else None,
            WARM_UP_SHARE,
        )

    def _require_possible(self, costs: Costs, *, is_split: bool) -> None:
        """Raises SettingError for objectives that not even an idle server meets: no fleet has to be simulated to see that."""
        wanted, rows, steps = self._demand.objectives, sorted(self._demand.lengths.rows), costs.steps
        prompt, step_ms = rows[int(self._demand.attainment * (len(rows) - 1))][0], 1000 * steps.decode_s(1, rows[0][0])
        computed_s = steps.prefill_s(prompt, prompt**2) * (costs.roles.prefill if is_split else 1.0)
        first_ms = 1000 * (costs.outside_s(is_split=is_split) + computed_s)
        require(step_ms <= wanted.itl_p99_ms, "itl_p99_ms", wanted.itl_p99_ms, f"at least {step_ms:.3g}, what a step of an idle server takes")
        require(first_ms <= wanted.ttft_ms, "ttft_ms", wanted.ttft_ms, f"at least {first_ms:.3g}, what an idle server takes for {prompt} tokens")

    def _costs(self, seed: int) -> Costs:
        costs = self._calibration.costs if seed == 0 else self._calibration.replicate(seed)
        return self._link.over(costs) if costs.path is not None else costs

    def _scaled(self, shape: FleetShape, factor: float) -> FleetShape:
        plain, prefill, decode = (math.ceil(num * factor - 1e-9) if num else 0 for num in (shape.num_plain, shape.num_prefill, shape.num_decode))
        return shape.of(plain=plain, prefill=prefill, decode=decode)

    def _guess(self, costs: Costs, is_split: bool) -> FleetShape:
        """From work alone: what prompts and rows take when servers are busy `GUESSED_USE` of the time and decode in full batches that ITL allows."""
        steps, rate, rows = costs.steps, self._demand.arrivals.rate_rps, self._demand.lengths.rows
        prompt = sum(row[0] for row in rows) / len(rows)
        square = sum(row[0] ** 2 for row in rows) / len(rows)
        answer = sum(row[1] for row in rows) / len(rows)
        prefill = rate * (steps.prefill_token_s * prompt + steps.prefill_square_s * square + steps.prefill_step_s) / GUESSED_USE
        batch = self._batch(costs, prompt + answer / 2)
        decode = rate * answer * steps.decode_s(batch, round(batch * (prompt + answer / 2))) / batch / GUESSED_USE
        if is_split:
            return self._base.of(prefill=max(1, math.ceil(prefill)), decode=max(1, math.ceil(decode)))
        return self._base.of(plain=max(1, math.ceil(prefill + decode)))

    def _batch(self, costs: Costs, context: float) -> int:
        """Rows of a step that is within half the objective, in pages that there are."""
        limits, goal_s = self._base.limits, self._demand.objectives.itl_p99_ms / 2000
        most = max(1, min(limits.max_running, int(limits.pool_tokens / max(context, 1))))
        fitting = [rows for rows in range(1, most + 1) if costs.steps.decode_s(rows, round(rows * context)) <= goal_s]
        return max(fitting, default=1)

    def _search(self, shape: FleetShape, demand: Demand, costs: Costs, seed: int) -> FleetShape:
        """Adds servers of the kind that misses its objective until both are met, in growing strides, then takes away what is not needed."""
        stride = 1
        for _ in range(MOST_STEPS):
            misses = self._misses(shape, demand, costs, seed)
            if self._is_met(misses):
                return self._trimmed(shape, demand, costs, seed)
            more = self._more(shape, misses, stride)
            if more.num_servers > MOST_CELL_SERVERS:
                break
            shape, stride = more, min(2 * stride, max(1, shape.num_servers // 4))
        raise SettingError(
            f"objectives are TTFT {demand.objectives.ttft_ms:g} ms and ITL p99 {demand.objectives.itl_p99_ms:g} ms, but with {shape.name} still "
            f"{100 * misses.share_or_stalled:.1f} % of the requests miss one ({misses.num_late_first} the first, {misses.num_slow_gaps} the second, "
            f"{misses.num_stalled} stalled, of {misses.num}): servers alone do not meet them; allow more, or shorter prompts in a step"
        )

    def _trimmed(self, shape: FleetShape, demand: Demand, costs: Costs, seed: int) -> FleetShape:
        """One server at a time, of each kind in turns, while the objectives are still met."""
        kinds = ["num_prefill", "num_decode"] if shape.is_split else ["num_plain"]
        while kinds:
            kind = kinds.pop(0)
            if getattr(shape, kind) == 1:
                continue
            less = replace(shape, **{kind: getattr(shape, kind) - 1})
            if self._is_met(self._misses(less, demand, costs, seed)):
                shape = less
                kinds.append(kind)
        return shape

    def _more(self, shape: FleetShape, misses: Misses, stride: int) -> FleetShape:
        if not shape.is_split:
            return shape.of(plain=shape.num_plain + stride)
        if misses.prefill_use > MOST_PREFILL_USE or misses.num_late_first >= max(misses.num_slow_gaps, misses.num_stalled):
            return shape.of(prefill=shape.num_prefill + stride, decode=shape.num_decode)
        return shape.of(prefill=shape.num_prefill, decode=shape.num_decode + stride)

    def _misses(self, shape: FleetShape, demand: Demand, costs: Costs, seed: int) -> Misses:
        outcome = simulate(costs, shape, drawn(demand.lengths, demand.arrivals, self._num_requests(shape, demand), seed), seed)
        misses = outcome.misses(demand.objectives, WARM_UP_SHARE)
        if self._is_met(misses):
            self._duration_s = outcome.mean_duration_s()
        return misses

    def _is_met(self, misses: Misses) -> bool:
        return misses.share_or_stalled <= 1 - self._demand.attainment and misses.prefill_use <= MOST_PREFILL_USE

    def _num_requests(self, shape: FleetShape, demand: Demand) -> int:
        """Enough that the fleet is full for most of the time: answers must have had time to pile up."""
        return max(MIN_REQUESTS, MIN_REQUESTS_PER_SERVER * shape.num_servers, math.ceil(MIN_DURATIONS * self._duration_s * demand.arrivals.rate_rps))


def _band(values: list[int]) -> Band:
    ordered = sorted(values)
    return Band(ordered[0], ordered[len(ordered) // 2], ordered[-1])
