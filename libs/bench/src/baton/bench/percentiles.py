"""Percentiles of a list of numbers, interpolated linearly between neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Percentiles:
    """In the unit of the values."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> "Percentiles | None":
        """Of `values` times `scale`; None of nothing, which is not zero."""
        if not values:
            return None
        scaled = np.asarray(values, dtype=np.float64) * scale
        p50, p90, p95, p99 = (float(value) for value in np.percentile(scaled, (50, 90, 95, 99)))
        return cls(len(values), float(scaled.mean()), p50, p90, p95, p99, float(scaled.max()))


@dataclass(frozen=True)
class Spread:
    """Of one figure over repeats."""

    num: int
    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        return cls(len(values), min(values), float(np.median(values)), max(values)) if values else None
