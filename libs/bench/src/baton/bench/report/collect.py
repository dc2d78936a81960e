"""From a folder to the content of its report: one run, several runs that are compared, or a run of `baton decide`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.bench.compare_runs import compare_runs
from baton.bench.decide.calm import load_words
from baton.bench.decide.energy_rows import HEAD as ENERGY_HEAD
from baton.bench.decide.energy_rows import energy_rows
from baton.bench.decide.record import FILE_NAME, Cell, DecideRecord
from baton.bench.decide.record import load as load_decide
from baton.bench.energy import idle_words
from baton.bench.errors import BenchFileError, SettingError
from baton.bench.measures import Objectives
from baton.bench.numbers import plain
from baton.bench.percentiles import Percentiles
from baton.bench.report import curves
from baton.bench.report.content import Cell as TableCell
from baton.bench.report.content import HeatMap, LineChart, Report, Section, Series, Table
from baton.bench.runfile import Run, load_run
from baton.bench.summary import Summary, summarise

LATENCY_HEAD = ("", "n", "p50", "p90", "p95", "p99", "max")


def collect(folder: Path, objectives: Objectives | None = None) -> Report:
    """`objectives`: for goodput of runs; a decide run has its own. Raises BenchFileError for a folder that holds neither, OSError."""
    if (folder / FILE_NAME).is_file():
        return _of_decide(folder, load_decide(folder))
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise BenchFileError(
            f"{folder} holds neither {FILE_NAME} nor run files (*.jsonl): name the --out folder of `baton bench run` or `baton decide`"
        )
    runs = [load_run(path) for path in paths]
    return _of_runs(runs, [summarise(run, objectives) for run in runs])


def _of_runs(runs: Sequence[Run], summaries: Sequence[Summary]) -> Report:
    header = runs[0].header
    facts = (
        ("model", header.model),
        ("workload", str(header.workload)),
        ("arrivals", header.arrivals),
        ("requests", f"{header.num_repeats} repeats of {header.num_requests}"),
        ("measured", f"{header.started_at}, {header.machine}"),
    )
    flags = tuple(f"{summary.header.name}: {flag}" for summary in summaries for flag in summary.flags)
    samples = {run.header.name: run.samples for run in runs}
    sections = [Section("Latency, ms", table=_latencies(summaries), wide=True), Section("Served", table=_served(summaries), wide=True)]
    sections += _energy_of_runs(summaries)
    if len(runs) > 1:
        sections += [_compared(runs[0], run) for run in runs[1:]]
    sections += [
        Section("Time to the first token", chart=curves.ttft_distribution(samples)),
        Section("Gaps between tokens", chart=curves.itl_distribution(samples)),
    ]
    for run in runs:
        sections.append(Section(f"{run.header.name}: gaps over time", chart=curves.gaps_over_time(curves.first_repeat(run))))
        sections.append(Section(f"{run.header.name}: the slowest requests", chart=curves.slowest(run.samples)))
    names = [run.header.name for run in runs]
    title = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return Report(title, "run" if len(runs) == 1 else "compare", facts, flags, tuple(sections))


def _latencies(summaries: Sequence[Summary]) -> Table:
    rows: list[tuple[TableCell, ...]] = []
    for summary in summaries:
        found = summary.latencies
        split = summary.long_prompts
        for name, values in (
            ("TTFT", found.ttft_ms),
            ("ITL", found.itl_ms),
            ("ITL during another's long prefill", split.during_ms),
            ("ITL otherwise", split.without_ms),
            ("TPOT", found.tpot_ms),
            ("end to end", found.e2e_ms),
        ):
            if values is not None:
                rows.append(_latency_row(f"{summary.header.name}: {name}", values))
    return Table(LATENCY_HEAD, tuple(rows))


def _latency_row(name: str, values: Percentiles) -> tuple[TableCell, ...]:
    return (name, values.num, values.p50, values.p90, values.p95, values.p99, values.max)


def _served(summaries: Sequence[Summary]) -> Table:
    head = ("", "requests", "failed", "requests/s", "output tokens/s", "good", "good requests/s")
    rows = []
    for summary in summaries:
        good = summary.goodput
        judged = (f"{100 * good.share:.1f} %", good.good_rps) if good is not None else (None, None)
        served = (summary.num_requests, summary.num_failed, summary.requests_per_s, summary.output_tokens_per_s)
        rows.append((summary.header.name, *served, *judged))
    return Table(head, tuple(rows))


def _energy_of_runs(summaries: Sequence[Summary]) -> list[Section]:
    """Over the output tokens that the server reported; the prompts' work is in it."""
    rows: list[tuple[TableCell, ...]] = []
    for summary in summaries:
        num_tokens, devices = summary.tokens.reported, summary.energy.devices if summary.energy is not None else ()
        for one in devices:
            per_token = one.joules / num_tokens if num_tokens else None
            rows.append((summary.header.name, one.device, one.role, one.joules, one.joules / one.seconds, per_token))
    return [Section("Energy", table=Table(("", "GPU", "role", "J", "mean W", "J per output token"), tuple(rows)), wide=True)] if rows else []


def _compared(subject: Run, baseline: Run) -> Section:
    title = f"{subject.header.name} over {baseline.header.name}"
    try:
        found = compare_runs(subject, baseline)
    except SettingError as error:
        return Section(title, (f"Not compared: {error}",), wide=True)
    head = ("", "pairs of", "pairs", subject.header.name, baseline.header.name, "ratio", "quartiles")
    rows = tuple(
        (row.metric, row.pairs_of, row.found.num_pairs, row.found.subject, row.found.baseline, f"{row.found.ratio:.3f}",
         f"{row.found.ratio_low:.3f} to {row.found.ratio_high:.3f}") for row in found.rows
    )  # fmt: skip
    return Section(title, ("Below 1: the first was less.", *found.flags), Table(head, rows), wide=True)


def _of_decide(folder: Path, record: DecideRecord) -> Report:
    targets, verdict = record.targets, record.verdict
    facts = (
        ("model", record.model),
        ("devices", ", ".join(record.devices) + (" (shared)" if record.shared_device else "")),
        ("machine", f"{record.machine.cpu}, {record.machine.num_cores} cores, {', '.join(record.machine.gpus) or 'no GPU'}, {record.machine.system}"),
        ("before the first server", load_words(record.machine)),
        ("workload", str(record.workload)),
        ("objectives", f"TTFT {targets.ttft_ms:g} ms, ITL p99 {targets.itl_p99_ms:g} ms, for {100 * targets.attainment:g} % ({targets.source})"),
        ("measured", f"{record.created_at}, {record.command}"),
        *([] if record.energy is None else [("energy", idle_words(record.energy))]),
    )
    sections = []
    if verdict is not None:
        sections.append(Section("Verdict", (verdict.headline, *verdict.reasons, *verdict.sizing, *verdict.diagnoses), _capacities(record), wide=True))
    sections += [
        Section("Goodput over load", chart=_goodput(record)),
        Section("Which ratio at which load: % of good requests", chart=_heat_map(record)),
        *_energy_of_decide(record),
        *_loaded(folder, record),
    ]
    lags = [f"cell {cell.number} ({cell.topology}, {cell.rate_rps:g} requests/s): {lag}" for cell in record.cells for lag in cell.lag]
    return Report(f"Does the split pay? {record.model}", "decide", facts, (*record.notes, *lags), tuple(sections))


def _energy_of_decide(record: DecideRecord) -> list[Section]:
    rows = energy_rows(record)
    if not rows:
        return []
    names = list(dict.fromkeys(row.topology for row in rows))
    series = [Series(name, tuple((row.rate_rps, row.per_token) for row in rows if row.topology == name)) for name in names]
    chart = LineChart("offered, requests/s", "J per output token", tuple(series))
    table = Table(ENERGY_HEAD, tuple(row.values for row in rows))
    return [Section("Energy per output token over load", chart=chart), Section("Energy by role", table=table, wide=True)]


def _capacities(record: DecideRecord) -> Table:
    assert record.verdict is not None
    head = ("topology", "highest load that meets the objectives, requests/s", "90 %", "what breaks above it")
    rows = []
    for found in record.verdict.capacities:
        rps = f"{'at least ' if found.at_least else 'below ' if found.at_most else ''}{plain(found.rps)}"
        rows.append((found.topology, rps, f"{plain(found.low)} to {plain(found.high)}", found.limit))
    return Table(head, tuple(rows))


def _goodput(record: DecideRecord) -> LineChart:
    series = []
    for topology in record.topologies:
        points = sorted((cell.rate_rps, cell.goodput_rps) for cell in record.cells_of(topology.name))
        series.append(Series(topology.name, tuple(points)))
    highest = max((cell.rate_rps for cell in record.cells), default=1.0)
    return LineChart("offered, requests/s", "good requests/s", (*series, Series("all good", ((0.0, 0.0), (highest, highest)), "dashes")))


def _heat_map(record: DecideRecord) -> HeatMap:
    rates = sorted({cell.rate_rps for cell in record.cells})
    names = [_ratio_name(record, topology.name) for topology in record.topologies]
    values = [tuple(_good_share(record.cells_of(topology.name), rate) for rate in rates) for topology in record.topologies]
    return HeatMap("offered, requests/s", "", tuple(plain(rate) for rate in rates), tuple(names), tuple(values))


def _ratio_name(record: DecideRecord, name: str) -> str:
    topology = record.topology(name)
    return f"{topology.num_prefill}P:{topology.num_decode}D" if topology.kind == "split" else f"{topology.num_plain} plain"


def _good_share(cells: Sequence[Cell], rate: float) -> float | None:
    """Of all cells of this rate together."""
    mine = [cell for cell in cells if cell.rate_rps == rate]
    num = sum(cell.num_requests for cell in mine)
    return sum(cell.num_good for cell in mine) / num if num else None


def _loaded(folder: Path, record: DecideRecord) -> Iterator[Section]:
    """All topologies at one load that all were measured at, the highest of these; where there is none, each at its own highest."""
    common = set.intersection(*({cell.rate_rps for cell in record.cells_of(one.name)} for one in record.topologies)) if record.topologies else set()
    runs: dict[str, Run] = {}
    for topology in record.topologies:
        cells = record.cells_of(topology.name)
        if cells:
            rate = max(common) if common else max(cell.rate_rps for cell in cells)
            chosen = next(cell for cell in cells if cell.rate_rps == rate)
            runs[f"{topology.name} at {plain(rate)}/s"] = load_run(folder / chosen.samples)
    samples = {name: run.samples for name, run in runs.items()}
    if not samples:
        return
    yield Section("Time to the first token", chart=curves.ttft_distribution(samples))
    yield Section("Gaps between tokens", chart=curves.itl_distribution(samples))
    for name, run in runs.items():
        yield Section(f"{name}: gaps over time", chart=curves.gaps_over_time(curves.first_repeat(run)))
        yield Section(f"{name}: the slowest requests", chart=curves.slowest(run.samples))
