"""One run over another: the same requests in pairs, and the headline figures of repeats in pairs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from baton.bench.errors import SettingError
from baton.bench.measures import end_to_end_s, gaps_s, tpot_s, ttft_s
from baton.bench.ratio import Comparison, compare
from baton.bench.runfile import Run, RunHeader
from baton.bench.sample import Sample
from baton.bench.summary import figures_of

MIN_PAIRS = 4


@dataclass(frozen=True)
class Row:
    """`pairs_of`: "requests" or "repeats"."""

    metric: str
    pairs_of: str
    found: Comparison


@dataclass(frozen=True)
class RunComparison:
    subject: str
    baseline: str
    rows: tuple[Row, ...]
    flags: tuple[str, ...]


def _median_gap(sample: Sample) -> float | None:
    return float(np.median(gaps)) if (gaps := gaps_s(sample)) else None


def _p99_gap(sample: Sample) -> float | None:
    return float(np.percentile(gaps, 99)) if (gaps := gaps_s(sample)) else None


OF_A_REQUEST: dict[str, Callable[[Sample], float | None]] = {
    "TTFT ms": ttft_s,
    "median ITL of a request ms": _median_gap,
    "p99 ITL of a request ms": _p99_gap,
    "TPOT ms": tpot_s,
    "end to end ms": end_to_end_s,
}


def compare_runs(subject: Run, baseline: Run) -> RunComparison:
    """Raises SettingError if the runs did not ask for the same, or have fewer than 4 requests that both answered."""
    _require_same(subject.header, baseline.header)
    pairs = _answered_pairs(subject, baseline)
    if len(pairs) < MIN_PAIRS:
        raise SettingError(f"both runs answered {len(pairs)} requests, but a comparison needs at least {MIN_PAIRS}")
    rows = [*_request_rows(pairs), *_repeat_rows(subject, baseline)]
    return RunComparison(subject.header.name, baseline.header.name, tuple(rows), tuple(_flags(subject, baseline, len(pairs))))


def _require_same(subject: RunHeader, baseline: RunHeader) -> None:
    for field in ("workload", "num_requests", "num_warm_up"):
        ours, theirs = getattr(subject, field), getattr(baseline, field)
        if ours != theirs:
            raise SettingError(
                f"{field} is {ours!r} in {subject.name!r} and {theirs!r} in {baseline.name!r}, but only runs of the same requests can be compared"
            )


def _answered_pairs(subject: Run, baseline: Run) -> list[tuple[Sample, Sample]]:
    theirs = {(sample.repeat, sample.index): sample for sample in baseline.samples if sample.error is None}
    ours = [sample for sample in subject.samples if sample.error is None]
    return [(sample, theirs[key]) for sample in ours if (key := (sample.repeat, sample.index)) in theirs]


def _request_rows(pairs: list[tuple[Sample, Sample]]) -> Iterator[Row]:
    for metric, value in OF_A_REQUEST.items():
        both = [(1000 * ours, 1000 * theirs) for a, b in pairs if (ours := value(a)) is not None and (theirs := value(b)) is not None and theirs > 0]
        if len(both) >= MIN_PAIRS:
            yield Row(metric, "requests", compare([ours for ours, _ in both], [theirs for _, theirs in both]))


def _repeat_rows(subject: Run, baseline: Run) -> Iterator[Row]:
    """Percentiles over all requests of a repeat: the tail that a pair of requests does not show."""
    both = list(zip(map(figures_of, subject.repeats), map(figures_of, baseline.repeats), strict=False))
    for metric in figures_of(subject.samples):
        values = [(ours[metric], theirs[metric]) for ours, theirs in both if metric in ours and theirs.get(metric, 0.0) > 0]
        if len(values) >= MIN_PAIRS:
            yield Row(metric, "repeats", compare([ours for ours, _ in values], [theirs for _, theirs in values]))


def _flags(subject: Run, baseline: Run, num_pairs: int) -> Iterator[str]:
    if subject.header.session != baseline.header.session:
        yield "not measured in turns: what changed on the machine between the runs is in the ratios (give `baton bench run` both targets at once)"
    if subject.header.arrivals != baseline.header.arrivals:
        yield f"arrivals differ: {subject.header.arrivals} and {baseline.header.arrivals}"
    if subject.header.model != baseline.header.model:
        yield f"models differ: {subject.header.model} and {baseline.header.model}"
    for run in (subject, baseline):
        num_failed = sum(sample.error is not None for sample in run.samples)
        if num_failed:
            yield f"{run.header.name}: {num_failed} of {len(run.samples)} requests failed; {num_pairs} pairs are left"
    if min(len(subject.repeats), len(baseline.repeats)) < MIN_PAIRS:
        yield f"fewer than {MIN_PAIRS} repeats of each: no ratios of percentiles over whole repeats"
