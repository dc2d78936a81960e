"""How much load a topology carries within the objectives, and how sure that is. Pure; the bootstrap is seeded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.bench.decide.record import Capacity, Cell, Contest

NUM_RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
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

    def shares(self) -> tuple[list[float], list[float]]:
        """(share of good requests, requests) at each rate."""
        asked = [float(sum(num for _, num in cells)) for cells in self.cells]
        good = [float(sum(num_good for num_good, _ in cells)) for cells in self.cells]
        return [part / whole if whole else 0.0 for part, whole in zip(good, asked, strict=True)], asked

    def resampled(self, draw: np.random.Generator) -> tuple[list[float], list[float]]:
        """Cells drawn with replacement, and requests within them: a share of 1 of few requests is not certain."""
        shares, weights = [], []
        for cells in self.cells:
            picked = [cells[place] for place in draw.integers(len(cells), size=len(cells))]
            asked = sum(num for _, num in picked)
            good = sum(int(draw.binomial(num, (num_good + 0.5) / (num + 1))) for num_good, num in picked)
            shares.append(good / asked if asked else 0.0)
            weights.append(float(asked))
        return shares, weights


def falling(shares: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest shares, by weighted squares, that never rise with load (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for share, weight in zip(shares, weights, strict=True):
        blocks.append((share, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (left, left_weight, left_size), (right, right_weight, right_size) = blocks[-2:]
            together = left_weight + right_weight
            mean = (left * left_weight + right * right_weight) / together if together else (left + right) / 2
            blocks[-2:] = [(mean, together, left_size + right_size)]
    return [share for share, _, size in blocks for _ in range(size)]


def crossing_rps(rates_rps: Sequence[float], shares: Sequence[float], attainment: float) -> float:
    """The load at which falling `shares` pass through `attainment`, on the logarithm of the load between two measured ones.

    The highest measured load if all shares are above; if none is, the lowest load scaled by how far its share is off, which is an upper bound in
    spirit only: `Capacity.at_most` says so."""
    above = [place for place, share in enumerate(shares) if share >= attainment]
    if not above:
        return rates_rps[0] * shares[0] / attainment
    last = above[-1]
    if last == len(rates_rps) - 1:
        return rates_rps[last]
    high, low = shares[last], shares[last + 1]
    part = (high - attainment) / (high - low)
    return float(np.exp(np.interp(part, (0, 1), np.log((rates_rps[last], rates_rps[last + 1])))))


def draws_of(curve: Curve, attainment: float, seed: int) -> Draws:
    """Capacity in every resample."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(NUM_RESAMPLES):
        shares, weights = curve.resampled(draw)
        found.append(crossing_rps(curve.rates_rps, falling(shares, weights), attainment))
    return np.asarray(found)


def capacity_of(topology: str, cells: Sequence[Cell], attainment: float, draws: Draws) -> Capacity:
    curve = Curve.of(cells)
    fitted = falling(*curve.shares())
    low, high = (float(value) for value in np.percentile(draws, INTERVAL))
    rps = crossing_rps(curve.rates_rps, fitted, attainment)
    return Capacity(
        topology=topology,
        rps=rps,
        low=low,
        high=high,
        at_least=fitted[-1] >= attainment,
        at_most=fitted[0] < attainment,
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
