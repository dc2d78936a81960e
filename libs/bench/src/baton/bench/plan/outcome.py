"""What a simulation says: every job's times, and the figures that a measured run has."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.bench.measures import Objectives
from baton.bench.plan.fleet import FleetShape
from baton.bench.plan.job import Job, Times
from baton.bench.plan.rows import Rows

#: Jobs that arrive in this first part of the time are served, but not counted: the fleet is still filling.
WARM_UP_SHARE = 0.1


@dataclass(frozen=True)
class Predicted:
    """Milliseconds. `goodput_share`: of the counted jobs, None without objectives. The rates are of what ended while
    requests still arrived; `busy_share` is of all servers' time."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    requests_per_s: float
    output_tokens_per_s: float
    busy_share: float
    goodput_share: float | None = None


@dataclass(frozen=True)
class Misses:
    """Of `num` counted jobs: those whose first token was late, those whose own gaps were too slow, those that missed any of the two.

    `num_stalled`: those with a gap longer than the whole objective for a first token. The p99 of many gaps does not see a single long one, such as
    the wait of an answer that has begun for a seat among full decode servers; a fleet that has many of them does not keep up.
    `prefill_use`: all work of prefill servers over their time while requests arrived (0 without any); near 1 their queue grows and grows."""

    num: int
    num_late_first: int
    num_slow_gaps: int
    num_stalled: int
    num_missed: int
    num_missed_or_stalled: int
    prefill_use: float

    @property
    def share(self) -> float:
        return self.num_missed / self.num

    @property
    def share_or_stalled(self) -> float:
        return self.num_missed_or_stalled / self.num


@dataclass(frozen=True)
class Outcome:
    """`rows`: of every server that decodes."""

    shape: FleetShape
    jobs: Sequence[Job]
    rows: Sequence[Rows]
    ended_s: float
    busy_s: float
    prefill_busy_s: float = 0.0

    def counted(self, warm_up_share: float = WARM_UP_SHARE) -> list[Job]:
        since_s = self._since_s(warm_up_share)
        return [job for job in self.jobs if job.arrived_s >= since_s]

    def figures(self, objectives: Objectives | None = None, warm_up_share: float = WARM_UP_SHARE) -> Predicted:
        counted = self.counted(warm_up_share)
        ttft_p50, ttft_p99 = 1000 * np.percentile([job.first_s - job.arrived_s for job in counted], (50, 99))
        itl_p50, itl_p99 = 1000 * self.gap_percentiles((50, 99), warm_up_share)
        since_s, until_s = self._since_s(warm_up_share), max(job.arrived_s for job in self.jobs)
        # Of one burst there is no time between arrivals: what counts then is the time until all is done.
        until_s = until_s if until_s > since_s else self.ended_s
        served = [job for job in self.jobs if since_s <= job.ended_s <= until_s]
        return Predicted(
            ttft_p50_ms=float(ttft_p50),
            ttft_p99_ms=float(ttft_p99),
            itl_p50_ms=float(itl_p50),
            itl_p99_ms=float(itl_p99),
            requests_per_s=len(served) / (until_s - since_s),
            output_tokens_per_s=sum(job.answer for job in served) / (until_s - since_s),
            busy_share=self.busy_s / (self.shape.num_servers * max(self.ended_s, 1e-9)),
            goodput_share=None if objectives is None else 1 - self.misses(objectives, warm_up_share).share,
        )

    def misses(self, objectives: Objectives, warm_up_share: float = WARM_UP_SHARE) -> Misses:
        counted = self.counted(warm_up_share)
        judged = [_judge(job, objectives) for job in counted]
        late, slow, stalled = (sum(one[place] for one in judged) for place in range(3))
        return Misses(len(counted), late, slow, stalled, sum(one[0] or one[1] for one in judged), sum(map(any, judged)), self._prefill_use())

    def mean_duration_s(self) -> float:
        return sum(job.ended_s - job.arrived_s for job in self.jobs) / len(self.jobs)

    def gap_percentiles(self, percents: Sequence[float], warm_up_share: float = WARM_UP_SHARE) -> Times:
        """Of all gaps of all streams, in seconds; NaN where there is none."""
        since_s = self._since_s(warm_up_share)
        gaps, weights = [], []
        for rows in self.rows:
            ends = np.asarray(rows.ends)
            kept = ends[1:] >= since_s
            gaps.append(np.diff(ends)[kept])
            weights.append(np.asarray(rows.rows_in_both[1:], dtype=np.float64)[kept])
            loose = np.asarray([gap for at_s, gap in rows.loose if at_s >= since_s])
            gaps.append(loose)
            weights.append(np.ones(len(loose)))
        return weighted_percentiles(np.concatenate(gaps), np.concatenate(weights), percents)

    def _prefill_use(self) -> float:
        arriving_s = max(job.arrived_s for job in self.jobs)
        return self.prefill_busy_s / (self.shape.num_prefill * arriving_s) if self.shape.num_prefill and arriving_s else 0.0

    def _since_s(self, warm_up_share: float) -> float:
        return warm_up_share * max(job.arrived_s for job in self.jobs)


def weighted_percentiles(values: Times, weights: Times, percents: Sequence[float]) -> Times:
    """Interpolated between neighbours as numpy does for a list in which every value stands as often as it weighs."""
    kept = weights > 0
    if not kept.any():
        return np.full(len(percents), np.nan)
    order = np.argsort(values[kept])
    values, last = values[kept][order], np.cumsum(weights[kept][order]) - 1
    first = last - weights[kept][order] + 1
    places = np.asarray(percents) / 100 * last[-1]
    found: npt.NDArray[np.float64] = np.interp(places, np.stack((first, last), 1).ravel(), np.repeat(values, 2))
    return found


def _judge(job: Job, objectives: Objectives) -> tuple[bool, bool, bool]:
    """(late, slow, stalled). np.percentile's rule, without its price for hundreds of thousands of short lists."""
    late = 1000 * (job.first_s - job.arrived_s) > objectives.ttft_ms
    gaps = job.gaps_s()
    if not len(gaps):
        return late, False, False
    gaps.sort()
    place = 0.99 * (len(gaps) - 1)
    low = int(place)
    high = min(low + 1, len(gaps) - 1)
    slow = 1000 * (gaps[low] + (place - low) * (gaps[high] - gaps[low])) > objectives.itl_p99_ms
    return late, bool(slow), bool(1000 * gaps[-1] > max(objectives.ttft_ms, objectives.itl_p99_ms))
