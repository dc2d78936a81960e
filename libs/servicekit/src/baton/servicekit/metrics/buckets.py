"""A histogram that costs a search and an addition: for what happens with every token or every step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


class Buckets:
    """Counts of values by upper bound, as Prometheus and OpenTelemetry have them: a value equal to a bound belongs to it.

    One thread adds; any thread may read at any time, and misses at most the values that are being added.
    """

    __slots__ = ("bounds", "counts", "highest", "lowest", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: ascending; one more bucket takes what is above the last."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.lowest = math.inf
        self.highest = -math.inf

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if value < self.lowest:
            self.lowest = value
        if value > self.highest:
            self.highest = value

    def add_zeros(self, count: int) -> None:
        """`count` values of 0."""
        if count > 0:
            self.counts[bisect_left(self.bounds, 0.0)] += count
            self.lowest = min(self.lowest, 0.0)
            self.highest = max(self.highest, 0.0)
