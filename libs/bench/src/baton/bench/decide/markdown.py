"""A decide run as Markdown: the verdict first, then what it rests on."""

from collections.abc import Sequence

from baton.bench.decide.calm import load_words
from baton.bench.decide.energy_rows import HEAD, energy_rows
from baton.bench.decide.record import Cell, DecideRecord, IdlePoint, Verdict
from baton.bench.energy import idle_words
from baton.bench.numbers import plain
from baton.bench.percentiles import Percentiles


def decide_markdown(record: DecideRecord, verdict: Verdict) -> str:
    sections = {
        "Why": _list(*verdict.reasons),
        "Ratio": _list(*verdict.sizing),
        "Diagnoses": _list(*verdict.diagnoses) if verdict.diagnoses else "None.",
        "Under load": _cells(record.cells),
        "Energy": _energy(record),
        "Idle": _idle(record.idle),
        "How it was measured": _setting(record),
    }
    body = [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    return "\n\n".join([f"# {verdict.headline}", *body]) + "\n"


def _cells(cells: Sequence[Cell]) -> str:
    head = (
        "| topology | requests/s | cell | requests | good | goodput, requests/s | late first tokens | slow gaps | failed | TTFT p50, p99 | "
        "ITL p50, p99 | ITL p99 during a long prefill, otherwise |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    ordered = sorted(cells, key=lambda cell: (cell.topology, cell.rate_rps, cell.number))
    return "\n".join([head, *map(_cell, ordered)]) + "\n\nTimes in milliseconds."


def _cell(cell: Cell) -> str:
    values = (
        cell.topology,
        plain(cell.rate_rps),
        f"{cell.number} ({cell.phase})",
        str(cell.num_requests),
        f"{100 * cell.good_share:.0f} %",
        f"{cell.goodput_rps:.2f}",
        str(cell.num_late_first),
        str(cell.num_slow_gaps),
        str(cell.num_failed),
        _pair(cell.ttft_ms),
        _pair(cell.itl_ms),
        f"{_p99(cell.itl_during_ms)}, {_p99(cell.itl_without_ms)}",
    )
    return f"| {' | '.join(values)} |"


def _pair(found: Percentiles | None) -> str:
    return "–" if found is None else f"{found.p50:.0f}, {found.p99:.0f}"


def _p99(found: Percentiles | None) -> str:
    return "–" if found is None else f"{found.p99:.0f}"


def _idle(points: Sequence[IdlePoint]) -> str:
    head = "| topology | prompt tokens | at once | TTFT ms | step ms | bootstrap ms | transfer exposed ms | path |\n|---|---|---|---|---|---|---|---|"
    rows = [
        f"| {point.topology} | {point.prompt_tokens} | {point.concurrency} | {point.ttft_ms:.0f} | {point.itl_ms:.1f} | "
        f"{_maybe(point.bootstrap_ms)} | {_maybe(point.exposed_ms)} | {point.transport or '–'} |"
        for point in points
    ]
    return "\n".join([head, *rows])


def _energy(record: DecideRecord) -> str:
    """Empty where no counter was read: "How it was measured" says why."""
    rows = [[plain(value) if isinstance(value, float) else str(value) for value in row.values] for row in energy_rows(record)]
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(HEAD), *lines[1:]]) if rows else ""


def _maybe(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _setting(record: DecideRecord) -> str:
    targets, machine = record.targets, record.machine
    wanted = f"TTFT at most {targets.ttft_ms:g} ms and p99 of a request's own gaps at most {targets.itl_p99_ms:g} ms"
    sharing = " (servers share a device)" if record.shared_device else ""
    lines = [
        f"{record.created_at}: `{record.command}`",
        f"{machine.cpu}, {machine.num_cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, {machine.system}",
        f"GPUs: {', '.join(machine.gpus) or 'none'}",
        f"before the first server was started: {load_words(machine)}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        f"model {record.model}; devices {', '.join(record.devices)}{sharing}",
        f"at most {record.chunk_tokens or 'the default number of'} prompt tokens in a step that a plain server shares with streams",
        f"objectives: {wanted}, by {100 * targets.attainment:g} % of the requests ({targets.source})",
        f"workload {record.workload}",
        f"{record.equality.num_prompts} greedy answers of {record.equality.num_tokens} tokens: "
        + (f"different on {', '.join(record.equality.different)}" if record.equality.different else "equal on all topologies"),
        *([] if record.energy is None else [f"energy: {idle_words(record.energy)}"]),
        *record.notes,
    ]
    return _list(*lines)


def _list(*lines: str) -> str:
    return "\n".join(f"* {line}" for line in lines)
