"""Summaries and comparisons as Markdown."""

from baton.bench.compare_runs import RunComparison
from baton.bench.energy import Energy, token_words
from baton.bench.numbers import plain
from baton.bench.percentiles import Percentiles
from baton.bench.summary import Summary

ROW_HEAD = "| | n | mean | p50 | p90 | p95 | p99 | max |\n|---|---|---|---|---|---|---|---|"


def summary_markdown(summary: Summary) -> str:
    """Tokens first: every rate is worth what they are worth."""
    latencies, split = summary.latencies, summary.long_prompts
    times = (("TTFT", latencies.ttft_ms), ("ITL (every gap)", latencies.itl_ms), ("TPOT", latencies.tpot_ms), ("end to end", latencies.e2e_ms))
    ratio = "" if split.p99_ratio is None else f"; p99 during over p99 without: {split.p99_ratio:.2f}"
    sections = {
        "What to know before the figures": _list(*summary.flags) if summary.flags else "Nothing speaks against them.",
        "Output tokens": _tokens(summary),
        "Latency, ms": _rows(*times),
        "ITL and long prompts, ms": f"{split.num_long} long prompts{ratio}\n\n"
        + _rows(("while another's long prompt was in prefill", split.during_ms), ("otherwise", split.without_ms)),
        "Served": _served(summary),
    }
    if summary.energy is not None and summary.energy.devices:
        sections["Energy"] = _energy(summary.energy, summary.tokens.reported)
    if summary.server:
        sections["As the server reported"] = _rows(*summary.server.items())
    if summary.header.num_repeats > 1:
        sections["Spread over repeats"] = _spread(summary)
    sections["The generator's own lag, ms"] = _rows(("sent after schedule", summary.lag.send_ms), ("timers late", summary.lag.loop_ms))
    return "\n\n".join([_head(summary), *(f"## {title}\n\n{body}" for title, body in sections.items())]) + "\n"


def _head(summary: Summary) -> str:
    header = summary.header
    lines = (
        f"model `{header.model}`",
        f"workload {header.workload}",
        f"arrivals {header.arrivals}",
        f"{header.num_repeats} repeats of {header.num_requests} requests",
        f"{header.started_at}, {header.machine}",
    )
    return f"# {header.name}: {header.target}\n\n" + _list(*lines)


def _energy(energy: Energy, num_tokens: int) -> str:
    lines = [f"{one.device} ({one.role}): {plain(one.joules, 4)} J, {plain(one.joules / one.seconds, 4)} W" for one in energy.devices]
    return _list(*([f"{token_words(energy, num_tokens)} per output token"] if num_tokens else []), *lines)


def _spread(summary: Summary) -> str:
    rows = [
        f"| {name} | {spread.num} | {plain(spread.min, 4)} | {plain(spread.median, 4)} | {plain(spread.max, 4)} |"
        for name, spread in summary.spread.items()
    ]
    return "\n".join(["| | repeats | least | median | most |", "|---|---|---|---|---|", *rows])


def comparison_markdown(comparison: RunComparison) -> str:
    lines = [
        f"| {row.metric} | {row.pairs_of} | {row.found.num_pairs} | {plain(row.found.subject, 4)} | {plain(row.found.baseline, 4)} | "
        f"{row.found.ratio:.3f} ({row.found.ratio_low:.3f} to {row.found.ratio_high:.3f}) |"
        for row in comparison.rows
    ]
    parts = [
        f"# {comparison.subject} over {comparison.baseline}",
        "Below 1: the first was less. Medians of both, and the median and quartiles of the ratios of pairs.",
        _list(*comparison.flags) if comparison.flags else "Measured in turns, on the same requests.",
        f"| | pairs of | pairs | {comparison.subject} | {comparison.baseline} | ratio (quartiles) |\n|---|---|---|---|---|---|\n" + "\n".join(lines),
    ]
    return "\n\n".join(parts) + "\n"


def _tokens(summary: Summary) -> str:
    tokens = summary.tokens
    checked = "not retokenised" if tokens.retokenised is None else f"{tokens.retokenised} retokenised from the texts"
    return f"{checked}; {tokens.reported} reported; {tokens.num_differing} answers differ."


def _served(summary: Summary) -> str:
    lines = [
        f"{plain(summary.requests_per_s)} requests/s, {plain(summary.output_tokens_per_s, 4)} output tokens/s",
        f"{summary.num_failed} of {summary.num_requests} requests failed",
    ]
    lines += [f"{cause}: {num}" for cause, num in summary.errors.items()]
    if (good := summary.goodput) is not None:
        wanted = f"TTFT at most {good.objectives.ttft_ms:g} ms and ITL p99 at most {good.objectives.itl_p99_ms:g} ms"
        lines.append(f"goodput ({wanted}): {good.num_good} requests, {100 * good.share:.1f} %, {plain(good.good_rps)}/s")
    return _list(*lines)


def _rows(*rows: tuple[str, Percentiles | None]) -> str:
    return "\n".join([ROW_HEAD, *(_row(name, found) for name, found in rows)])


def _row(name: str, found: Percentiles | None) -> str:
    if found is None:
        return f"| {name} | 0 | | | | | | |"
    return (
        f"| {name} | {found.num} | "
        + " | ".join(plain(value, 4) for value in (found.mean, found.p50, found.p90, found.p95, found.p99, found.max))
        + " |"
    )


def _list(*lines: str) -> str:
    return "\n".join(f"* {line}" for line in lines)
