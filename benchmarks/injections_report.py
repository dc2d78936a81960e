"""The report of injections.py: Markdown, and a plot of the p99 of the gaps over the rate of injections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from injections_rows import Cell, Row

from baton.bench.decide.calm import is_busy, load_words
from baton.bench.decide.record import Machine
from baton.bench.energy import EnergySource, idle_words, token_words

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 320, 60, 40
COLOURS = {"split": "#0b7285", "copies": "#c2255c"}


def markdown(head: dict[str, Any], energy: EnergySource, rows: Sequence[Row], crossing: float | None, cells: Sequence[Cell], name: str) -> str:
    injected = [row for row in rows if row.rate_rps]
    worst = max(row.ratio.get("split", float("nan")) for row in injected)
    target = head["target_ratio"]
    machine, load = head["machine"], head["load"]
    busy = is_busy(Machine(**machine))
    where = {None: "at no rate that was measured", 0.0: "at every rate, also without injections"}.get(
        crossing, f"from {crossing or 0:.2g} injections/s on"
    )
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items() if not package.startswith("baton-"))
    without = ", ".join(f"{rows[0].all_p99_ms[topology]:.0f} ms ({topology})" for topology in COLOURS)
    load_before = f"{load_words(Machine(**machine))}, before the first server was started"
    lines = [
        "# Chat streams while long prompts are injected",
        f"Split: ITL p99 during injections is at most {worst:.2f} x that without any; target {target}: {'met' if worst <= target else '**missed**'}.",
        f"The p99 of all gaps is lower in the split than in the copies {where}.",
        f"**Other work ran on the machine ({load_before}): the figures are noisy.**" if busy else f"The machine was otherwise idle ({load_before}).",
        f"    {head['command']}",
        (f"{head['started_at']}; {machine['cpu']}, {machine['num_cores']} cores, {machine['system']}; GPUs: {', '.join(machine['gpus']) or 'none'}; "
        f"{versions}."),
        (f"Devices {head['devices']}{' (**shared**)' if head['shared_device'] else ''}, a server each; model {head['model']}; the copies compute at "
        f"most {head['chunk_tokens']} prompt tokens beside their streams. {load['streams']} streams of {load['answer_tokens']} tokens; injected "
        f"prompts have {load['document_words']} words; {head['repeats']} repeats in turns. Failed requests: {sum(cell.failed for cell in cells)}."),
        table(injected),
        ("Ratios: p99 of the streams' gaps while an injected prompt was in prefill, over the p99 of the gaps of the same repeat's cell without "
        f"injections; median (least to most) of the repeats. Times in milliseconds. Without injections the p99 is {without}."),
        f"Energy: {idle_words(energy)}.",
        *energy_lines(rows, cells),
        f"![p99 of all gaps over the rate of injections]({name}.svg)",
    ]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def table(rows: Sequence[Row]) -> str:
    head = (
        "| injections/s | split: during / without | copies: during / without | p99 during: split, copies | p99 of all gaps: split, copies | "
        "TTFT of the injected: split, copies | streams' tokens/s: split, copies |\n|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *map(line, rows)])


def energy_lines(rows: Sequence[Row], cells: Sequence[Cell]) -> list[str]:
    """Nothing where no counter was read at all: why has been said."""
    used = [(row, topology, *row.energy[topology]) for row in rows for topology in COLOURS if topology in row.energy]
    lines = [f"* {topology} at {row.rate_rps:g} injections/s: {token_words(found, num)}" for row, topology, found, num in used]
    unread = [cell.energy.missing for cell in cells if cell.energy is not None and cell.energy.missing]
    said = [f"The energy of {len(unread)} of {len(cells)} cells could not be read: {unread[0]}."] if unread else []
    return [*said, *(["Per output token of the streams and the injected together:\n\n" + "\n".join(lines)] if lines else [])]


def line(row: Row) -> str:
    def pair(values: dict[str, float], form: str = ".0f") -> str:
        return f"{values['split']:{form}}, {values['copies']:{form}}"

    def ratio(name: str) -> str:
        return f"{row.ratio[name]:.2f} ({row.ratio_low[name]:.2f} to {row.ratio_high[name]:.2f})" if name in row.ratio else "–"

    values = (pair(row.during_p99_ms), pair(row.all_p99_ms), pair(row.ttft_injected_ms), pair(row.tokens_per_s, ".1f"))
    return f"| {row.rate_rps:g} | {ratio('split')} | {ratio('copies')} | {' | '.join(values)} |"


def svg(rows: Sequence[Row], crossing: float | None) -> str:
    most_rate = max(row.rate_rps for row in rows) or 1.0
    most_ms = 1.1 * max(value for row in rows for value in row.all_p99_ms.values())

    def x(rate: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * rate / most_rate

    def y(ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 20) * ms / most_ms

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    parts.append(f'<path d="M{LEFT} 20V{HEIGHT - BOTTOM}H{WIDTH - 20}" fill="none" stroke="black"/>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">injections a second</text>')
    parts.append('<text x="8" y="14">ITL p99 of the streams, ms</text>')
    for step in range(1, 5):
        ms = most_ms * step / 4
        parts.append(f'<text x="{LEFT - 6}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:.0f}</text>')
    parts += [f'<text x="{x(row.rate_rps):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{row.rate_rps:g}</text>' for row in rows]
    for place, (name, colour) in enumerate(COLOURS.items()):
        points = " ".join(f"{x(row.rate_rps):.1f},{y(row.all_p99_ms[name]):.1f}" for row in rows)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 10}" y="{36 + 16 * place}" fill="{colour}">{name}</text>')
    if crossing:
        parts.append(f'<path d="M{x(crossing):.1f} 20V{HEIGHT - BOTTOM}" stroke="gray" stroke-dasharray="4"/>')
        parts.append(f'<text x="{x(crossing) + 4:.1f}" y="32" fill="gray">crossover {crossing:.2g}/s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
