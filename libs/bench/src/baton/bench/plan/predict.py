"""Predictions with error bars: the same fleet simulated with several seeds, each with costs from another resample of the calibration's points."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from baton.bench.measures import Objectives
from baton.bench.plan.calibration import Calibration
from baton.bench.plan.costs import Costs
from baton.bench.plan.fleet import FleetShape
from baton.bench.plan.load import Load
from baton.bench.plan.outcome import WARM_UP_SHARE, Predicted
from baton.bench.plan.simulation import simulate


@dataclass(frozen=True)
class Band:
    """Over seeds."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """`figures`: by the name of a field of `Predicted`."""

    shape: FleetShape
    num_requests: int
    num_seeds: int
    figures: dict[str, Band]


@dataclass(frozen=True)
class Link:
    """What the path between servers has instead of the measured one; None leaves it."""

    bandwidth: float | None = None
    handoff_s: float | None = None

    def over(self, costs: Costs) -> Costs:
        changes = {name: value for name, value in (("bandwidth", self.bandwidth), ("handoff_s", self.handoff_s)) if value is not None}
        return costs.with_path(**changes) if changes else costs


def predict(
    calibration: Calibration,
    shape: FleetShape,
    load_of: Callable[[int], Load],
    num_seeds: int,
    objectives: Objectives | None = None,
    link: Link | None = None,
    warm_up_share: float = WARM_UP_SHARE,
    step: Callable[[int], None] = lambda done: None,
) -> Prediction:
    """`load_of(seed)` may be the same for every seed. `step` is told after each."""
    found: list[Predicted] = []
    num_requests = 0
    for seed in range(num_seeds):
        costs = (link or Link()).over(calibration.costs if seed == 0 else calibration.replicate(seed))
        outcome = simulate(costs, shape, load_of(seed), seed)
        num_requests += len(outcome.jobs)
        found.append(outcome.figures(objectives, warm_up_share))
        step(seed + 1)
    return Prediction(shape, num_requests, num_seeds, bands(found))


def bands(found: list[Predicted]) -> dict[str, Band]:
    """Least, median and most of every figure that all have."""
    named: dict[str, Band] = {}
    for field in fields(Predicted):
        values = [value for one in found if (value := getattr(one, field.name)) is not None]
        if len(values) == len(found):
            named[field.name] = Band(float(np.min(values)), float(np.median(values)), float(np.max(values)))
    return named


def exact(calibration: Calibration, costs: Costs) -> Calibration:
    """The same, with these costs alone."""
    return replace(calibration, costs=costs, replicates=())
