"""Two things measured in turns in one run, so that whatever slows the machine slows both: their ratio is what counts."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Medians of both, and the median and quartiles of the ratios of neighbours in time. Below 1: the subject was less."""

    subject: float
    baseline: float
    ratio: float
    ratio_low: float
    ratio_high: float
    num_pairs: int


def compare(subject: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Pair i are the i-th values of both. Raises ValueError for unequal or too few (under 4) pairs, or a baseline that is not positive."""
    if len(subject) != len(baseline) or len(subject) < 4:
        raise ValueError(f"a comparison needs at least 4 pairs, got {len(subject)} and {len(baseline)} values")
    if min(baseline) <= 0:
        raise ValueError(f"a baseline value is {min(baseline)}, but must be above 0")
    ratios = [ours / theirs for ours, theirs in zip(subject, baseline, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Comparison(statistics.median(subject), statistics.median(baseline), middle, low, high, len(ratios))
