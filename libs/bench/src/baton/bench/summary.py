"""What a run says: every figure computed from its raw samples, and what speaks against trusting it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.bench.energy import Energy
from baton.bench.lag import LagReport, judge_lag
from baton.bench.measures import (
    Goodput,
    Objectives,
    duration_s,
    end_to_end_s,
    errors_by_cause,
    gaps_s,
    goodput,
    split_by_prefill,
    tpot_s,
    ttft_s,
)
from baton.bench.percentiles import Percentiles, Spread
from baton.bench.runfile import Run, RunHeader
from baton.bench.sample import Sample
from baton.bench.tokens import CountTokens, TokenCheck, check_tokens

#: More of the prompts than this from prefix caches is said. What chat templates begin with alike is less of most prompts.
SAID_CACHED_SHARE = 0.5
#: Below this many values their 99th percentile is little more than their maximum.
ENOUGH_FOR_P99 = 100


@dataclass(frozen=True)
class Latencies:
    """Milliseconds, of successful requests (gaps also of those that failed later). None where there is nothing to measure."""

    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None


@dataclass(frozen=True)
class LongPrompts:
    """Gaps of the other streams while a long prompt was in prefill, and all other gaps; `p99_ratio` is the first's p99 over the second's."""

    num_long: int
    during_ms: Percentiles | None
    without_ms: Percentiles | None
    p99_ratio: float | None


@dataclass(frozen=True)
class Summary:
    header: RunHeader
    num_requests: int
    num_failed: int
    errors: dict[str, int]
    tokens: TokenCheck
    latencies: Latencies
    long_prompts: LongPrompts
    goodput: Goodput | None
    requests_per_s: float
    output_tokens_per_s: float
    server: dict[str, Percentiles]
    spread: dict[str, Spread]
    lag: LagReport
    flags: tuple[str, ...]
    energy: Energy | None = None


def summarise(run: Run, objectives: Objectives | None = None, count_tokens: CountTokens | None = None) -> Summary:
    """Pure. `count_tokens` retokenises the answers; without it the reported numbers stand unchecked, and a flag says so."""
    samples, seconds = run.samples, duration_s(run.samples)
    answered = [sample for sample in samples if sample.error is None]
    latencies = latencies_of(samples)
    # Requests that were refused by the generator's own limit were never sent; all others have a lag.
    lag = judge_lag([sample.lag_s for sample in samples if sample.error != "not_sent"], run.loop_lag_s, latencies.ttft_ms, latencies.itl_ms)
    tokens, errors = check_tokens(samples, count_tokens), errors_by_cause(samples)
    flags = (*lag.verdicts, *_error_flags(errors, len(samples)), *_token_flags(tokens), *_cache_flags(answered), *_size_flags(latencies))
    return Summary(
        header=run.header,
        num_requests=len(samples),
        num_failed=len(samples) - len(answered),
        errors=errors,
        tokens=tokens,
        latencies=latencies,
        long_prompts=_long_prompts(run),
        goodput=goodput(samples, objectives, seconds) if objectives else None,
        requests_per_s=len(answered) / seconds if seconds > 0 else 0.0,
        output_tokens_per_s=sum(sample.num_tokens for sample in answered) / seconds if seconds > 0 else 0.0,
        server=_server(answered),
        spread=_spread(run, objectives),
        lag=lag,
        flags=(*flags, *_energy_flags(run.energy)),
        energy=run.energy,
    )


def latencies_of(samples: Sequence[Sample]) -> Latencies:
    answered = [sample for sample in samples if sample.error is None]
    return Latencies(
        ttft_ms=Percentiles.of([first for sample in answered if (first := ttft_s(sample)) is not None], 1000),
        itl_ms=Percentiles.of([gap for sample in samples for gap in gaps_s(sample)], 1000),
        tpot_ms=Percentiles.of([tpot for sample in answered if (tpot := tpot_s(sample)) is not None], 1000),
        e2e_ms=Percentiles.of([end_to_end_s(sample) for sample in answered], 1000),
    )


def _long_prompts(run: Run) -> LongPrompts:
    splits = [split_by_prefill(samples) for samples in run.repeats]
    during = Percentiles.of([gap for split in splits for gap in split.during_s], 1000)
    without = Percentiles.of([gap for split in splits for gap in split.without_s], 1000)
    ratio = during.p99 / without.p99 if during and without and without.p99 > 0 else None
    return LongPrompts(sum(sample.is_long for sample in run.samples), during, without, ratio)


def _server(answered: Sequence[Sample]) -> dict[str, Percentiles]:
    names = sorted({name for sample in answered for name in sample.server})
    values = {name: Percentiles.of([sample.server[name] for sample in answered if name in sample.server]) for name in names}
    return {name: found for name, found in values.items() if found is not None}


def _spread(run: Run, objectives: Objectives | None) -> dict[str, Spread]:
    figures: dict[str, list[float]] = {}
    for samples in run.repeats:
        for name, value in figures_of(samples, objectives).items():
            figures.setdefault(name, []).append(value)
    return {name: spread for name, values in figures.items() if (spread := Spread.of(values)) is not None}


def figures_of(samples: Sequence[Sample], objectives: Objectives | None = None) -> dict[str, float]:
    """The headline figures of one repeat, by name; what could not be measured is absent."""
    latencies = latencies_of(samples)
    figures: dict[str, float] = {}
    for name, found in (("TTFT", latencies.ttft_ms), ("ITL", latencies.itl_ms), ("TPOT", latencies.tpot_ms), ("end to end", latencies.e2e_ms)):
        if found is not None:
            figures |= {f"{name} p50 ms": found.p50, f"{name} p99 ms": found.p99}
    during = split_by_prefill(samples).during_s
    if during:
        figures["ITL p99 during long prefill ms"] = 1000 * float(np.percentile(during, 99))
    if objectives is not None:
        figures["goodput share"] = goodput(samples, objectives, duration_s(samples)).share
    return figures


def _error_flags(errors: dict[str, int], num_requests: int) -> list[str]:
    return [f"{sum(errors.values())} of {num_requests} requests failed; latencies are those of the others"] if errors else []


def _token_flags(tokens: TokenCheck) -> list[str]:
    flags = []
    if tokens.num_unreported:
        flags.append(f"{tokens.num_unreported} answers came without a number of tokens; messages were counted instead")
    if tokens.retokenised is None:
        flags.append("output tokens are as the server reported; give a tokenizer to check them")
    elif tokens.num_differing:
        counts = f"{tokens.retokenised} in the texts, {tokens.reported} reported"
        flags.append(f"{tokens.num_differing} answers hold another number of tokens than reported ({counts})")
    return flags


def _cache_flags(answered: Sequence[Sample]) -> list[str]:
    told = [sample for sample in answered if sample.prompt_tokens and "cached_tokens" in sample.server]
    cached = sum(sample.server["cached_tokens"] for sample in told)
    share = cached / sum(sample.prompt_tokens or 0 for sample in told) if told else 0.0
    if share <= SAID_CACHED_SHARE:
        return []
    return [f"{share:.0%} of the prompts' tokens came out of a prefix cache: take another --seed if these prompts were asked for before"]


def _energy_flags(energy: Energy | None) -> list[str]:
    return [f"energy: not available: {energy.missing}"] if energy is not None and energy.missing else []


def _size_flags(latencies: Latencies) -> list[str]:
    small = [(name, found.num) for name, found in (("TTFT", latencies.ttft_ms), ("ITL", latencies.itl_ms)) if found and found.num < ENOUGH_FOR_P99]
    return [f"the p99 of {name} rests on {num} values" for name, num in small]
