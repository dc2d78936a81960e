"""What the cells of injections.py come to: rows of medians over repeats, and the rate from which the split is ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from baton.bench.energy import Energy, total

TOPOLOGIES = ("split", "copies")


@dataclass
class Cell:
    """One topology at one rate of injections (requests/s, 0: none). Gaps in milliseconds: of the chat streams only. `num_tokens`: output tokens of
    the streams and of the injected requests, which `energy` was used for."""

    topology: str
    rate_rps: float
    repeat: int
    during_ms: list[float] = field(default_factory=list)
    all_ms: list[float] = field(default_factory=list)
    injected: int = 0
    ttft_injected_ms: list[float] = field(default_factory=list)
    tokens_per_s: float = 0.0
    failed: int = 0
    energy: Energy | None = None
    num_tokens: int = 0


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else float("nan")


@dataclass(frozen=True)
class Row:
    """Medians over repeats of one rate, topology by topology. `ratio`: p99 during injections over p99 of the cells without any, repeat by repeat.
    `energy`: of all repeats together, with their output tokens; without the topologies whose counters were not read."""

    rate_rps: float
    during_p99_ms: dict[str, float]
    all_p99_ms: dict[str, float]
    ratio: dict[str, float]
    ratio_low: dict[str, float]
    ratio_high: dict[str, float]
    ttft_injected_ms: dict[str, float]
    tokens_per_s: dict[str, float]
    energy: dict[str, tuple[Energy, int]]


def rows_of(cells: Sequence[Cell]) -> list[Row]:
    rows = []
    for rate in sorted({cell.rate_rps for cell in cells}):
        at = {name: [cell for cell in cells if cell.rate_rps == rate and cell.topology == name] for name in TOPOLOGIES}
        ratios = {name: [p99(cell.during_ms) / p99(control(cells, cell).all_ms) for cell in found if cell.during_ms] for name, found in at.items()}
        rows.append(
            Row(
                rate,
                {name: median(p99(cell.during_ms) for cell in found) for name, found in at.items()},
                {name: median(p99(cell.all_ms) for cell in found) for name, found in at.items()},
                {name: median(found) for name, found in ratios.items() if found},
                {name: min(found) for name, found in ratios.items() if found},
                {name: max(found) for name, found in ratios.items() if found},
                {name: median([ttft for cell in found for ttft in cell.ttft_injected_ms] or [float("nan")]) for name, found in at.items()},
                {name: median(cell.tokens_per_s for cell in found) for name, found in at.items()},
                {name: used for name, found in at.items() if (used := energy_of(found)) is not None},
            )
        )
    return rows


def energy_of(cells: Sequence[Cell]) -> tuple[Energy, int] | None:
    """Of the cells whose counters were read."""
    read = [cell for cell in cells if cell.energy is not None and not cell.energy.missing]
    energy, num_tokens = total([cell.energy for cell in read if cell.energy is not None]), sum(cell.num_tokens for cell in read)
    return None if energy is None or not num_tokens else (energy, num_tokens)


def control(cells: Sequence[Cell], of: Cell) -> Cell:
    return next(cell for cell in cells if cell.rate_rps == 0 and (cell.topology, cell.repeat) == (of.topology, of.repeat))


def crossover_rps(rows: Sequence[Row]) -> float | None:
    """The rate at which the copies' p99 over all gaps begins to be above the split's, interpolated; None if it never is, 0 if it always is."""
    over = [(row.rate_rps, row.all_p99_ms["copies"] / row.all_p99_ms["split"]) for row in rows]
    if over[0][1] > 1:
        return 0.0
    for (low, before), (high, after) in pairwise(over):
        if before <= 1 < after:
            return low + (high - low) * (1 - before) / (after - before)
    return None
