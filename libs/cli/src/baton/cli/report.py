"""A room's report as a table: where the time of one request went, and what moved."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.wire.status import origin_name, stage_name
from baton.wire.v1 import common_pb2, inference_pb2

BAR_COLUMNS = 40
MIN_WIDTH = 100


@dataclass(frozen=True)
class StateRow:
    name: str
    start_ms: float
    duration_ms: float
    bar: str


def state_rows(report: inference_pb2.RoomReport) -> list[StateRow]:
    """One row a state, its bar drawn on the time line of the whole request."""
    total_ms = max(report.total_ms, max((span.start_ms + span.duration_ms for span in report.states), default=0.0))
    rows = []
    for span in report.states:
        name = common_pb2.RoomState.Name(span.state).removeprefix("ROOM_STATE_")
        rows.append(StateRow(name, span.start_ms, span.duration_ms, bar(span.start_ms, span.duration_ms, total_ms)))
    return rows


def bar(start_ms: float, duration_ms: float, total_ms: float) -> str:
    """At least one mark, at its place on a line of BAR_COLUMNS."""
    if total_ms <= 0:
        return ""
    left = min(int(BAR_COLUMNS * start_ms / total_ms), BAR_COLUMNS - 1)
    length = max(1, round(BAR_COLUMNS * duration_ms / total_ms))
    return " " * left + "#" * min(length, BAR_COLUMNS - left)


def facts(report: inference_pb2.RoomReport) -> list[tuple[str, str]]:
    """Name and value of everything that is not a state."""
    rows = [
        ("prompt tokens", str(report.usage.prompt_tokens)),
        ("output tokens", str(report.usage.completion_tokens)),
    ]
    if report.HasField("transfer"):
        rows += transfer_facts(report.transfer)
    elif report.prefilled_on_decode:
        rows.append(("KV moved", "none (the decode server computed the prompt itself)"))
    else:
        rows.append(("KV moved", "none (prefill and decode ran in one server)"))
    rows += failure_facts(report)
    if report.prefill_started_ms > 0:
        rows.append(("prefill began after", f"{report.prefill_started_ms:.1f} ms"))
    rows += [
        ("TTFT", f"{report.ttft_ms:.1f} ms"),
        ("mean ITL", f"{report.mean_itl_ms:.2f} ms" if report.usage.completion_tokens > 1 else "- (one token)"),
        ("total", f"{report.total_ms:.1f} ms"),
    ]
    servers = [("prefill server", report.prefill_instance), ("decode server", report.decode_instance)]
    return rows + [(name, instance) for name, instance in servers if instance]


def failure_facts(report: inference_pb2.RoomReport) -> list[tuple[str, str]]:
    """A row for each room that failed before this one, and what that cost; none for an undisturbed request."""
    rows = []
    for number, attempt in enumerate(report.failed_attempts, start=1):
        failure = attempt.failure
        servers = " and ".join(dict.fromkeys((attempt.prefill_instance, attempt.decode_instance)))
        why = f"{failure.cause} ({origin_name(failure.origin)} in {stage_name(failure.stage)})"
        rows.append((f"failed attempt {number}", f"{why} on {servers} after {attempt.tokens_sent} tokens, {failure.elapsed_ms} ms"))
    if report.recomputed_tokens:
        rows.append(("tokens recomputed", str(report.recomputed_tokens)))
    return rows


def transfer_facts(transfer: inference_pb2.TransferReport) -> list[tuple[str, str]]:
    # From the first layer's put to the flush the prefill sets the pace, not the path: the speed is that of the time with a write under way.
    rate = f"{transfer.bytes / transfer.busy_ms / 1e6:.2f} GB/s" if transfer.busy_ms > 0 else "- (no time was measured)"
    return [
        ("KV bytes moved", f"{transfer.bytes:,} ({transfer.bytes / 2**20:.2f} MiB)"),
        ("puts", str(transfer.puts)),
        ("transport", transfer.transport),
        ("writing", f"{transfer.busy_ms:.2f} ms, {rate}"),
        ("first put to flush", f"{transfer.duration_ms:.2f} ms (the prefill runs meanwhile)"),
        ("after the last layer", f"{transfer.exposed_ms:.2f} ms"),
        ("digest", "equal on both sides" if transfer.digest_checked else "not checked"),
    ]


def print_report(console: Console, report: inference_pb2.RoomReport) -> None:
    """Prints both tables; without a terminal as plain aligned text."""
    if console.is_terminal:
        _print_tables(console, report)
        return
    plain = Console(width=MIN_WIDTH, no_color=True, force_terminal=False)
    with plain.capture() as captured:
        _print_tables(plain, report)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def _print_tables(console: Console, report: inference_pb2.RoomReport) -> None:
    states = Table(box=None, pad_edge=False, title=f"room {report.room}", title_justify="left", title_style="bold")
    states.add_column("state", no_wrap=True)
    states.add_column("from ms", justify="right", no_wrap=True)
    states.add_column("ms", justify="right", no_wrap=True)
    states.add_column("", no_wrap=True)
    for row in state_rows(report):
        states.add_row(row.name, f"{row.start_ms:.1f}", f"{row.duration_ms:.1f}", Text(row.bar, style="cyan"))
    others = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts(report):
        others.add_row(name, Text(value))
    console.print(states)
    console.print()
    console.print(others)
