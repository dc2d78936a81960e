"""A verdict's evidence in words, from the record. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from baton.bench.decide.capacity import Draws, contest
from baton.bench.decide.energy_rows import energy_row
from baton.bench.decide.record import Capacity, Cell, Contest, DecideRecord, Topology
from baton.bench.decide.weights import has_dummy_weights
from baton.bench.energy import token_words
from baton.bench.numbers import plain

LIMIT_WORDS = {
    "ttft": "the first token comes too late",
    "itl": "streams stutter (ITL)",
    "errors": "requests fail",
    "": "nothing broke at the loads measured",
}
#: Where a ratio stops to be a number: the baseline carried next to nothing.
BEYOND = 100.0


def words_of(record: DecideRecord, name: str) -> str:
    topology = record.topology(name)
    if topology.kind == "one":
        return "one server"
    return f"{topology.num_plain} copies" if topology.kind == "copies" else f"the split {topology.ratio}"


def carries(record: DecideRecord, name: str) -> str:
    return f"{words_of(record, name)} {'carry' if record.topology(name).kind == 'copies' else 'carries'}"


def ratio_words(found: Contest) -> str:
    high = "any" if found.high > BEYOND else f"{found.high:.2f}"
    return f"{min(found.ratio, BEYOND):.2f} x (90 %: {found.low:.2f} to {high})"


def capacity_words(found: Capacity) -> str:
    bound = "at least " if found.at_least else "less than " if found.at_most else ""
    return f"{bound}{plain(found.rps)} requests/s (90 %: {plain(found.low)} to {plain(found.high)})"


def of_load(record: DecideRecord, topology: Topology, capacities: Mapping[str, Capacity], load_rps: float) -> str:
    needless = {"one": "copies and a split are not needed", "copies": "a split is not needed", "split": "simpler topologies do not carry it for sure"}
    mine = f"{plain(load_rps)} requests/s within the objectives (limit {capacity_words(capacities[topology.name])})"
    return f"{carries(record, topology.name).capitalize()} {mine}; {needless[topology.kind]}."


def evidence(record: DecideRecord, capacities: Mapping[str, Capacity]) -> Iterator[str]:
    for name, found in capacities.items():
        yield f"{name}: {capacity_words(found)}; above it {LIMIT_WORDS[found.limit]}"
    for topology in record.topologies:
        if topology.name not in capacities:
            yield f"{topology.name}: not measured, so this verdict does not know it"
    yield from _tails(record)
    yield from _throughput(record)  # after the tokens that it rests on
    yield from _energy(record)


def _tails(record: DecideRecord) -> Iterator[str]:
    """ITL while somebody else's long prompt is in prefill, each topology at the highest load that all have in common."""
    for name, cells in _side_by_side(record):
        during = [cell.itl_during_ms.p99 for cell in cells if cell.itl_during_ms is not None]
        without = [cell.itl_without_ms.p99 for cell in cells if cell.itl_without_ms is not None]
        if during and without:
            high, low = sum(during) / len(during), sum(without) / len(without)
            yield (
                f"{name} at {plain(cells[0].rate_rps)} requests/s: ITL p99 {high:.0f} ms while a long prompt is in prefill, {low:.0f} ms otherwise, "
                f"{high / low:.2f} x"
            )


def _throughput(record: DecideRecord) -> Iterator[str]:
    measured = [topology for topology in record.topologies if record.cells_of(topology.name)]
    reported = {topology.name: sum(cell.tokens_reported for cell in record.cells_of(topology.name)) for topology in measured}
    counted = {topology.name: sum(cell.tokens_retokenised or 0 for cell in record.cells_of(topology.name)) for topology in measured}
    if has_dummy_weights(record):
        yield (
            "output tokens were not counted again from the texts: weights are random (--load-format dummy), and the tokens of random text "
            "do not come back from it"
        )
    elif any(counted.values()):
        yield "output tokens counted again from the texts: " + ", ".join(
            f"{name} {num} of {reported[name]} reported" for name, num in counted.items()
        )
    most = {topology.name: max((cell.output_tokens_per_s for cell in record.cells_of(topology.name)), default=0.0) for topology in measured}
    if len(most) > 1:
        yield "most output tokens a second in any cell, whether objectives were met or not: " + ", ".join(
            f"{name} {plain(rate)}" for name, rate in most.items()
        )


def _energy(record: DecideRecord) -> Iterator[str]:
    """Each topology at the highest load that all have in common: what idles costs the same whatever is asked."""
    rows = [row for name, cells in _side_by_side(record) if (row := energy_row(name, cells)) is not None]
    if rows:
        yield f"energy per output token at {plain(rows[0].rate_rps)} requests/s: " + "; ".join(
            f"{row.topology} {token_words(row.energy, row.num_tokens)}" for row in rows
        )


def _side_by_side(record: DecideRecord) -> list[tuple[str, Sequence[Cell]]]:
    """Cells of every topology under the highest load that most topologies have seen."""
    seen = {topology.name: {cell.rate_rps for cell in record.cells_of(topology.name)} for topology in record.topologies}
    rates = sorted({rate for found in seen.values() for rate in found}, key=lambda rate: (sum(rate in found for found in seen.values()), rate))
    if not rates:
        return []
    common = rates[-1]
    return [(name, [cell for cell in record.cells_of(name) if cell.rate_rps == common]) for name, found in seen.items() if common in found]


def sizing(record: DecideRecord, capacities: Mapping[str, Capacity], draws: Mapping[str, Draws]) -> Iterator[str]:
    """The best split, what moving one server either way does, and which side is the tighter one."""
    splits = sorted(
        (topology for topology in record.topologies if topology.name in capacities and topology.kind == "split"), key=lambda t: t.num_prefill
    )
    if not splits:
        return
    best = max(splits, key=lambda topology: capacities[topology.name].rps)
    if len(splits) == 1:
        yield f"{best.ratio} is the only split that was measured: the ratio itself was not compared"
    else:
        yield f"best ratio of prefill to decode: {best.ratio}, {capacity_words(capacities[best.name])}"
        yield from _moves(best, splits, draws)
    limit = capacities[best.name].limit
    if limit == "ttft":
        yield f"above the limit of {best.ratio} first tokens come late: prefill is the tighter side, the next server should be a prefill server"
    elif limit == "itl":
        yield f"above the limit of {best.ratio} streams stutter: decode is the tighter side, the next server should be a decode server"


def _moves(best: Topology, splits: Sequence[Topology], draws: Mapping[str, Draws]) -> Iterator[str]:
    for step, way in ((1, "from decode to prefill"), (-1, "from prefill to decode")):
        other = next((topology for topology in splits if topology.num_prefill == best.num_prefill + step), None)
        if other is not None:
            yield f"moving one server {way} ({other.ratio}): carries {ratio_words(contest(other.name, best.name, draws))} that of {best.ratio}"
