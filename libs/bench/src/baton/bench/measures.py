"""Pure functions over raw samples: times of a request, the tail with and without long prompts, goodput, errors."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from baton.bench.errors import require
from baton.bench.sample import Sample


def ttft_s(sample: Sample) -> float | None:
    """From sending to the first output; None without any."""
    return None if sample.first_s is None else sample.first_s - sample.sent_s


def gaps_s(sample: Sample) -> list[float]:
    """Every gap between two messages that carried output: what the reader of a stream sees."""
    return [later - earlier for earlier, later in pairwise(sample.token_s)]


def tpot_s(sample: Sample) -> float | None:
    """Mean time a token after the first message; None with fewer than two messages. Unlike the gaps it counts tokens that came in one message."""
    if len(sample.token_s) < 2:
        return None
    num_after_first = max(sample.num_tokens - sample.token_counts[0], len(sample.token_s) - 1)
    return (sample.token_s[-1] - sample.token_s[0]) / num_after_first


def end_to_end_s(sample: Sample) -> float:
    return sample.ended_s - sample.sent_s


def errors_by_cause(samples: Iterable[Sample]) -> dict[str, int]:
    """Most frequent first."""
    return dict(Counter(sample.error for sample in samples if sample.error is not None).most_common())


@dataclass(frozen=True)
class PrefillSplit:
    """Gaps of streams while a long prompt of somebody else was in prefill, and all others; seconds."""

    during_s: list[float]
    without_s: list[float]


def split_by_prefill(samples: Sequence[Sample]) -> PrefillSplit:
    """Of samples of one repeat. A long prompt is in prefill from its sending to its first output (or its end): its wait in a queue is within.

    A gap is `during` if it overlaps such a time. A stream's own gaps begin when its own prefill is over, so it is never held against itself."""
    prefills = _merged([(long.sent_s, long.ended_s if long.first_s is None else long.first_s) for long in samples if long.is_long])
    starts, ends = np.asarray([start for start, _ in prefills]), np.asarray([end for _, end in prefills])
    split = PrefillSplit([], [])
    for sample in samples:
        for earlier, later in pairwise(sample.token_s):
            # Merged intervals are disjoint and in order: only the last that starts before the gap's end can reach into it furthest.
            place = int(np.searchsorted(starts, later, side="left")) - 1
            overlaps = place >= 0 and ends[place] > earlier
            (split.during_s if overlaps else split.without_s).append(later - earlier)
    return split


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


@dataclass(frozen=True)
class Objectives:
    """What a request must meet to be good: its TTFT, and the 99th percentile of its own gaps."""

    ttft_ms: float
    itl_p99_ms: float

    def __post_init__(self) -> None:
        require(self.ttft_ms > 0, "ttft_ms", self.ttft_ms, "above 0")
        require(self.itl_p99_ms > 0, "itl_p99_ms", self.itl_p99_ms, "above 0")

    def met_by(self, sample: Sample) -> bool:
        """A failed request is never good; one with a single message has no gaps to judge."""
        first, gaps = ttft_s(sample), gaps_s(sample)
        if sample.error is not None or first is None or 1000 * first > self.ttft_ms:
            return False
        return not gaps or 1000 * float(np.percentile(gaps, 99)) <= self.itl_p99_ms


@dataclass(frozen=True)
class Goodput:
    """`share`: of all requests sent, failed ones among them. `good_rps`: good requests a second."""

    objectives: Objectives
    num_good: int
    share: float
    good_rps: float


def goodput(samples: Sequence[Sample], objectives: Objectives, duration_s: float) -> Goodput:
    """`duration_s`: of all repeats that `samples` are from, together."""
    num_good = sum(objectives.met_by(sample) for sample in samples)
    return Goodput(objectives, num_good, num_good / len(samples) if samples else 0.0, num_good / duration_s if duration_s > 0 else 0.0)


def duration_s(samples: Sequence[Sample]) -> float:
    """From the first sending to the last end, summed over repeats."""
    total = 0.0
    for repeat in {sample.repeat for sample in samples}:
        mine = [sample for sample in samples if sample.repeat == repeat]
        total += max(sample.ended_s for sample in mine) - min(sample.sent_s for sample in mine)
    return total
