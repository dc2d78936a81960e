"""How much load a topology carries within the objectives, and how sure that is. Pure; the bootstrap is seeded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.bench.decide.record import Capacity, Cell, Contest

NUM_RESAMPLES = 2000
#: Its lower end is what surely (95 %) is exceeded, which is what a more complex topology is asked: whether it is better, not whether it differs.
INTERVAL = (5.0, 95.0)
#: Of `spread_of` before anything was measured, and how many degrees of freedom that belief weighs. Runs on CPU cores came to 0.2 to 9.6.
ASSUMED_SPREAD, ASSUMED_FREEDOM = 3.0, 4
Draws = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Good and asked requests of every cell, by offered rate, ascending."""

    rates_rps: tuple[float, ...]
    cells: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> "Curve":
        rates = sorted({cell.rate_rps for cell in cells})
        return cls(tuple(rates), tuple(tuple((cell.num_good, cell.num_requests) for cell in cells if cell.rate_rps == rate) for rate in rates))

    def shares(self) -> tuple[Draws, Draws]:
        """(share of good requests, requests) at each rate: one row."""
        asked = [float(sum(num for _, num in cells)) for cells in self.cells]
        good = [float(sum(num_good for num_good, _ in cells)) for cells in self.cells]
        return _shares(np.asarray([good]), np.asarray([asked]))

    def resampled(self, draw: np.random.Generator, spread: float) -> tuple[Draws, Draws]:
        """The same in NUM_RESAMPLES rows: cells drawn with replacement, and requests within them, for a share of 1 of few requests is not certain.

        `spread`: how many times more cells differ than their requests alone explain; so many requests say as much as one."""
        good, asked = [], []
        for cells in self.cells:
            num_good, num = np.asarray(cells, dtype=np.int64).T
            picks = draw.integers(len(cells), size=(NUM_RESAMPLES, len(cells)))
            telling = np.maximum(1, np.rint(num / spread)).astype(np.int64)[picks]
            drawn = draw.binomial(telling, ((num_good + 0.5) / (num + 1))[picks])
            good.append(drawn.sum(axis=1))
            asked.append(telling.sum(axis=1))
        return _shares(np.asarray(good, dtype=np.float64).T, np.asarray(asked, dtype=np.float64).T)


def _shares(good: Draws, asked: Draws) -> tuple[Draws, Draws]:
    return np.divide(good, asked, out=np.zeros_like(good), where=asked > 0), asked


def falling(shares: Draws, weights: Draws) -> Draws:
    """The closest rows, by weighted squares, that never rise with load: at each place the least, over where a run may begin, of the greatest, over
    where it may end, mean of the run (isotonic regression). `shares`, `weights`: [rows, rates]."""
    num = shares.shape[1]
    zero = np.zeros((len(shares), 1))
    sums = np.concatenate([zero, np.cumsum(shares * weights, axis=1)], axis=1)
    masses = np.concatenate([zero, np.cumsum(weights, axis=1)], axis=1)
    fitted = np.full_like(shares, np.inf)
    for first in range(num):
        runs = (sums[:, first + 1 :] - sums[:, first : first + 1]) / np.maximum(masses[:, first + 1 :] - masses[:, first : first + 1], 1e-12)
        greatest = np.maximum.accumulate(runs[:, ::-1], axis=1)[:, ::-1]
        fitted[:, first:] = np.minimum(fitted[:, first:], greatest)
    return fitted


def crossing_rps(rates_rps: Sequence[float], shares: Draws, attainment: float) -> Draws:
    """The load at which each row of falling `shares` passes through `attainment`, on the logarithm of the load between two measured ones.

    The highest measured load if all of a row is above; if nothing is, the lowest load scaled by how far its share is off: an extrapolation, which
    `Capacity.at_most` says."""
    rates = np.asarray(rates_rps, dtype=np.float64)
    num_above = (shares >= attainment).sum(axis=1)
    left = np.clip(num_above - 1, 0, len(rates) - 1)
    right = np.minimum(left + 1, len(rates) - 1)
    rows = np.arange(len(shares))
    drop = shares[rows, left] - shares[rows, right]
    part = np.clip((shares[rows, left] - attainment) / np.where(drop > 0, drop, 1.0), 0.0, 1.0)
    between = rates[left] * (rates[right] / rates[left]) ** part
    found: Draws = np.where(num_above == 0, rates[0] * shares[:, 0] / attainment, np.where(num_above == len(rates), rates[-1], between))
    return found


def spread_of(curves: Sequence[Curve]) -> float:
    """How many times more cells differ from falling curves than requests that are good or bad each for itself would make them differ (Pearson's
    chi-square over its degrees of freedom, of all topologies together: what disturbs one disturbs all). At least 1.

    Few cells that happen to agree do not show that cells agree: it begins from ASSUMED_SPREAD, which the cells overrule as there are more of them."""
    chi_square, freedom = ASSUMED_SPREAD * ASSUMED_FREEDOM, ASSUMED_FREEDOM
    for curve in curves:
        fitted = falling(*curve.shares())[0]
        freedom += sum(map(len, curve.cells)) - len(np.unique(np.round(fitted, 9)))
        for share, cells in zip(fitted, curve.cells, strict=True):
            for num_good, num in cells:
                if 0 < share < 1:
                    chi_square += (num_good - num * share) ** 2 / (num * share * (1 - share))
    return max(1.0, chi_square / freedom)


def draws_of(curve: Curve, attainment: float, seed: int, spread: float = 1.0) -> Draws:
    """Capacity in every resample."""
    return crossing_rps(curve.rates_rps, falling(*curve.resampled(np.random.default_rng(seed), spread)), attainment)


def capacity_of(topology: str, cells: Sequence[Cell], attainment: float, draws: Draws) -> Capacity:
    curve = Curve.of(cells)
    fitted = falling(*curve.shares())
    low, high = (float(value) for value in np.percentile(draws, INTERVAL))
    rps = float(crossing_rps(curve.rates_rps, fitted, attainment)[0])
    return Capacity(
        topology=topology,
        rps=rps,
        low=low,
        high=high,
        at_least=bool(fitted[0, -1] >= attainment),
        at_most=bool(fitted[0, 0] < attainment),
        limit=limit_of([cell for cell in cells if cell.rate_rps > rps]),
    )


def limit_of(broken: Sequence[Cell]) -> str:
    """What most requests missed in the cells above the capacity."""
    missed = {
        "errors": sum(cell.num_failed for cell in broken),
        "ttft": sum(cell.num_late_first for cell in broken),
        "itl": sum(cell.num_slow_gaps for cell in broken),
    }
    return max(missed, key=lambda name: missed[name]) if any(missed.values()) else ""


def contest(subject: str, baseline: str, draws: Mapping[str, Draws]) -> Contest:
    """Of resamples drawn independently. A baseline that carries nothing in a resample is beaten there by whatever carries more than nothing."""
    ours, theirs = draws[subject], draws[baseline]
    ratios = ours / np.maximum(theirs, 1e-9)
    low, middle, high = (float(value) for value in np.percentile(ratios, (INTERVAL[0], 50, INTERVAL[1])))
    return Contest(subject, baseline, middle, low, high, float(np.mean(ours > theirs)))
