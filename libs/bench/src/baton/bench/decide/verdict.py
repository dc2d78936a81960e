"""The verdict: a pure function of the record. Simpler topologies win what is too close to call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.bench.decide.calm import is_busy
from baton.bench.decide.capacity import Curve, Draws, capacity_of, contest, draws_of, spread_of
from baton.bench.decide.diagnoses import diagnose
from baton.bench.decide.reasons import carries, evidence, of_load, ratio_words, sizing, words_of
from baton.bench.decide.record import Capacity, Contest, DecideRecord, Outcome, Topology, Verdict
from baton.bench.numbers import plain

SEED = 20_26
BUSY = " But the machine was busy with other work: repeat this when it is calm."
#: From simple to complex: each must earn its place against the one before.
ORDER = ("one", "copies", "split")


@dataclass(frozen=True)
class Choice:
    outcome: Outcome
    recommended: str
    headline: str
    contests: tuple[Contest, ...]


def judge(record: DecideRecord) -> Verdict:
    """Needs cells of at least two topologies, or of one if there is only one."""
    diagnoses = diagnose(record)
    measured = [topology for topology in record.topologies if record.cells_of(topology.name)]
    attainment = record.targets.attainment
    curves = {topology.name: Curve.of(record.cells_of(topology.name)) for topology in measured}
    spread = spread_of(list(curves.values()))
    draws = {name: draws_of(curve, attainment, SEED + place, spread) for place, (name, curve) in enumerate(curves.items())}
    capacities = {name: capacity_of(name, record.cells_of(name), attainment, found) for name, found in draws.items()}
    if record.equality.different:
        different = ", ".join(record.equality.different)
        headline = f"No verdict: greedy answers of {different} differ from those of {record.topologies[0].name}; speed of wrong answers says nothing."
        choice = Choice("invalid", "", headline, ())
    elif not measured:
        choice = Choice("invalid", "", "No verdict: nothing was measured.", ())
    else:
        field = _field(measured, capacities)
        choice = _by_load(record, field, capacities, draws) if record.targets.load_rps is not None else _by_capacity(record, field, capacities, draws)
    return Verdict(
        outcome=choice.outcome,
        recommended=choice.recommended,
        headline=choice.headline + (BUSY if is_busy(record.machine) else ""),
        reasons=(
            *evidence(record, capacities),
            f"cells differ {spread:.1f} times as much as their requests alone would make them (in the intervals)",
        ),
        sizing=tuple(sizing(record, capacities, draws)),
        diagnoses=tuple(diagnoses),
        capacities=tuple(capacities.values()),
        contests=choice.contests,
    )


def _field(measured: Sequence[Topology], capacities: Mapping[str, Capacity]) -> list[Topology]:
    """The best of each kind, from simple to complex."""
    of_kind = [[topology for topology in measured if topology.kind == kind] for kind in ORDER]
    return [max(topologies, key=lambda topology: capacities[topology.name].rps) for topologies in of_kind if topologies]


def _by_capacity(record: DecideRecord, field: Sequence[Topology], capacities: Mapping[str, Capacity], draws: Mapping[str, Draws]) -> Choice:
    """Who carries most; a more complex one must be above the champion in 95 % of the bootstrap's resamples."""
    if all(capacities[topology.name].at_most for topology in field):
        return _none(record, field, capacities)
    champion, close, contests = field[0], list[Contest](), list[Contest]()
    for challenger in field[1:]:
        found = contest(challenger.name, champion.name, draws)
        contests.append(found)
        if found.low > 1:
            champion, close = challenger, []
        elif found.high >= 1:
            close.append(found)
    if close:
        rivals = " and ".join(f"{words_of(record, found.subject)} ({ratio_words(found)})" for found in close)
        headline = f"Too close to call: {rivals} cannot be told from {words_of(record, champion.name)}; run the simpler, {champion.name}."
        return Choice("too_close", champion.name, headline, tuple(contests))
    return Choice(champion.kind, champion.name, _headline(record, champion, capacities, contests), tuple(contests))


def _headline(record: DecideRecord, champion: Topology, capacities: Mapping[str, Capacity], contests: Sequence[Contest]) -> str:
    mine = f"{carries(record, champion.name)} {plain(capacities[champion.name].rps)} requests/s within the objectives"
    if not contests:
        return f"{champion.name}: {mine}; nothing else was measured."
    if champion.kind == "split":
        baseline = contests[-1].baseline
        if capacities[baseline].at_most:
            return f"The split pays: {mine}; {words_of(record, baseline)} met them at no load that was measured."
        return f"The split pays: {mine}, {ratio_words(contests[-1])} what {carries(record, baseline)} on the same devices."
    lost = [found for found in contests if found.baseline == champion.name]
    losers = "; ".join(f"{carries(record, found.subject)} {ratio_words(found)} that" for found in lost)
    split_lost = any(record.topology(found.subject).kind == "split" for found in lost)
    return f"{'The split loses: ' if split_lost else ''}{mine}{'; ' + losers if losers else ''}."


def _none(record: DecideRecord, field: Sequence[Topology], capacities: Mapping[str, Capacity]) -> Choice:
    lowest = min(cell.rate_rps for cell in record.cells)
    limits = "; ".join(f"{topology.name}: {capacities[topology.name].limit or 'nothing'} breaks first" for topology in field)
    return Choice("none", "", f"None: no topology met the objectives even at the lowest load measured, {plain(lowest)} requests/s ({limits}).", ())


def _by_load(record: DecideRecord, field: Sequence[Topology], capacities: Mapping[str, Capacity], draws: Mapping[str, Draws]) -> Choice:
    """The simplest that surely carries the user's load; complexity that the load does not need is not bought."""
    load_rps = record.targets.load_rps
    assert load_rps is not None
    contests = tuple(contest(later.name, earlier.name, draws) for earlier, later in pairwise(field))
    for topology in field:
        if capacities[topology.name].low >= load_rps:
            return Choice(topology.kind, topology.name, of_load(record, topology, capacities, load_rps), contests)
    hopeful = [topology for topology in field if capacities[topology.name].high >= load_rps]
    if not hopeful:
        best = max(field, key=lambda topology: capacities[topology.name].rps)
        most = capacities[best.name].rps
        text = (
            f"None: no topology of these devices carries {plain(load_rps)} requests/s; the most is {words_of(record, best.name)} with {plain(most)}."
        )
        return Choice("none", "", text, contests)
    likely = max(hopeful, key=lambda topology: capacities[topology.name].rps)
    found = capacities[likely.name]
    text = (
        f"Too close to call at {plain(load_rps)} requests/s: none carries it for sure; the likeliest is {words_of(record, likely.name)} "
        f"with {plain(found.rps)} ({plain(found.low)} to {plain(found.high)})."
    )
    return Choice("too_close", likely.name, text, contests)
