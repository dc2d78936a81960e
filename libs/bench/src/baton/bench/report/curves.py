"""Pure functions from samples to charts: distributions, gaps over time, the slowest requests."""

from collections.abc import Mapping, Sequence

import numpy as np

from baton.bench.measures import gaps_s, ttft_s
from baton.bench.report.content import Bar, LineChart, Series, Waterfall
from baton.bench.runfile import Run
from baton.bench.sample import Sample

MOST_POINTS = 160
NUM_BINS = 140
NUM_SLOWEST = 12
#: As the gateway reports them, in a room's order; and what remains.
STATES = ("bootstrapping", "waiting", "transferring", "success", "failed")
SHOWN_STATES = {"success": "decoding"}
OUTSIDE = "outside of the gateway"


def distribution(name: str, values_ms: Sequence[float]) -> Series:
    """Share of the values that are at most x. The last percent is kept in full: it is what a tail is read from."""
    ordered = np.sort(np.asarray(values_ms, dtype=np.float64))
    shares = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    if len(ordered) > MOST_POINTS:
        kept = np.unique(
            np.concatenate((np.linspace(0, len(ordered) - 1, MOST_POINTS), np.arange(max(0, len(ordered) - 20), len(ordered)))).astype(int)
        )
        ordered, shares = ordered[kept], shares[kept]
    return Series(name, tuple(zip(ordered.tolist(), (100 * shares).tolist(), strict=True)), "steps")


def ttft_distribution(runs: Mapping[str, Sequence[Sample]]) -> LineChart:
    series = [distribution(name, [1000 * first for sample in samples if (first := ttft_s(sample)) is not None]) for name, samples in runs.items()]
    return LineChart("TTFT, ms", "% of requests", tuple(series), log_x=True)


def itl_distribution(runs: Mapping[str, Sequence[Sample]]) -> LineChart:
    series = [distribution(name, [1000 * gap for sample in samples for gap in gaps_s(sample) if gap > 0]) for name, samples in runs.items()]
    return LineChart("ITL (every gap), ms", "% of gaps", tuple(series), log_x=True)


def gaps_over_time(samples: Sequence[Sample]) -> LineChart:
    """Of one repeat: median and longest gap that ended in each slice of its time, and when long prompts were in prefill."""
    ends = np.asarray([end for sample in samples for end in sample.token_s[1:]])
    gaps = np.asarray([1000 * gap for sample in samples for gap in gaps_s(sample)])
    bands = [(sample.sent_s, sample.ended_s if sample.first_s is None else sample.first_s) for sample in samples if sample.is_long]
    if not len(ends):
        return LineChart("seconds", "gap, ms", (), bands=tuple(bands), band_name="a long prompt is in prefill")
    edges = np.linspace(0, float(ends.max()) * (1 + 1e-9), NUM_BINS + 1)
    places = np.digitize(ends, edges) - 1
    longest, middle = [], []
    for place in np.unique(places):
        within = gaps[places == place]
        at_s = float((edges[place] + edges[min(place + 1, NUM_BINS)]) / 2)
        longest.append((at_s, float(within.max())))
        middle.append((at_s, float(np.median(within))))
    series = (Series("longest gap", tuple(longest), "dots"), Series("median gap", tuple(middle), "dots"))
    return LineChart("seconds from the start of the repeat", "gap, ms", series, bands=tuple(bands), band_name="a long prompt is in prefill")


def slowest(samples: Sequence[Sample]) -> Waterfall:
    """Of answered requests by their whole time. Without a gateway's states: until the first token, and after it."""
    answered = sorted((sample for sample in samples if sample.error is None and sample.token_s), key=lambda sample: sample.sent_s - sample.ended_s)
    bars = tuple(_bar(sample) for sample in answered[:NUM_SLOWEST])
    seen = {state for bar in bars for state, _, _ in bar.spans}
    known = [*(SHOWN_STATES.get(state, state) for state in STATES), "until the first token", "answering", OUTSIDE]
    return Waterfall("ms from sending", bars, tuple(state for state in known if state in seen))


def _bar(sample: Sample) -> Bar:
    name = f"{sample.index}" if sample.repeat == 0 else f"{sample.repeat}/{sample.index}"
    name += f" ({sample.kind})"
    times = [(state, sample.server[f"state_{state}_ms"]) for state in STATES if f"state_{state}_ms" in sample.server]
    total_ms = 1000 * (sample.ended_s - sample.sent_s)
    if not times:
        first_ms = 1000 * (sample.token_s[0] - sample.sent_s)
        return Bar(name, (("until the first token", 0.0, first_ms), ("answering", first_ms, total_ms)))
    spans, at_ms = [], 0.0
    for state, took_ms in times:
        spans.append((SHOWN_STATES.get(state, state), at_ms, at_ms + took_ms))
        at_ms += took_ms
    if total_ms > at_ms:
        spans.append((OUTSIDE, at_ms, total_ms))
    return Bar(name, tuple(spans))


def first_repeat(run: Run) -> Sequence[Sample]:
    return run.repeats[0] if run.repeats else ()
