"""What is drawn: tables that fit the terminal as it is now. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.report import bar
from baton.cli.top.known import Known, Row

ROLE_STYLES = {"prefill": "magenta", "decode": "cyan", "plain": "yellow"}
STATE_STYLES = {"BOOTSTRAPPING": "white", "WAITING": "yellow", "TRANSFERRING": "blue", "SUCCESS": "green", "FAILED": "red"}
STATE_NAMES = {"SUCCESS": "streaming"}
SPARKS = "▁▂▃▄▅▆▇█"
WINDOW_S = 5
BAR = 14
#: Rows that the parts take beside their own: titles, heads, what is between them.
FRAME_ROWS = 12


@dataclass
class Choice:
    """What whoever sits there has chosen. selected: number of a request that has ended; None: the newest. whole: no limit of rows."""

    selected: int | None = None
    opened: bool = False
    only_failed: bool = False
    note: str = ""
    whole: bool = False


def draw(known: Known, choice: Choice, height: int) -> RenderableType:
    """Everything in at most about `height` rows."""
    if not known.sections:
        return Text(choice.note or "connecting", style="dim")
    free = max(6, height - FRAME_ROWS - len(known.sections["problems"][:2]))
    servers = len(known.sections["servers"]) if choice.whole else min(len(known.sections["servers"]), max(2, free // 3))
    live = len(known.sections["live"]) if choice.whole else min(len(known.sections["live"]), max(1, (free - servers) // 3))
    rest = max(3, free - servers - live)
    parts: list[RenderableType] = [_head(known, choice), *_problems(known), _servers(known, servers), _latencies(known), _live(known, live)]
    requests = known.newest(only_failed=choice.only_failed)
    chosen = next((row for row in requests if row["n"] == choice.selected), None)
    if choice.opened and chosen is not None:
        parts.append(waterfall(chosen))
    else:
        parts.append(_ended(requests, choice, len(requests) if choice.whole else rest))
    if not choice.whole:
        keys = "Esc back" if choice.opened else "↑ ↓ choose   Enter its waterfall   f failed only"
        parts.append(Text(f"q quit   {keys}", style="dim"))
    return Group(*parts)


def _head(known: Known, choice: Choice) -> Text:
    about, counts = known.sections["about"], known.sections["counts"]
    state = "draining" if about["draining"] else "ready" if about["ready"] else "not ready"
    process = f" {about['processes']} processes" if about["processes"] > 1 else ""
    if about["away"]:
        process += f" (without process {', '.join(map(str, about['away']))}, which does not answer)"
    text = Text.assemble((f"{about['gateway']}", "bold"), f" {about['model']}{process}  ", (state, "green" if state == "ready" else "bold red"))
    if choice.note:
        text.append(f"  {choice.note}", "bold red")
    rate, tokens = _rates(known)
    text.append(f"\n{rate:.1f} req/s  {tokens:.0f} tokens/s  open {counts['open']:,}  queued {counts['queued']:,}  ")
    text.append(f"finished {counts['ended']:,}  retried {counts['retried']:,}  ")
    bad = counts["failed"] + counts["refused"]
    text.append(f"failed {bad:,}", "red" if bad else "")
    return text


def _rates(known: Known) -> tuple[float, float]:
    """Requests and tokens a second in the last whole window."""
    point = known.sections["series"].get(str(known.sections["now"] // 1000 // WINDOW_S - 1))
    return (point[0] / WINDOW_S, point[2] / WINDOW_S) if point else (0.0, 0.0)


def _problems(known: Known) -> list[Text]:
    return [Text(f"problem: {text}", style="red", overflow="fold") for text in known.sections["problems"][:2]]


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def _servers(known: Known, limit: int) -> RenderableType:
    table = _table("server", "state", "rooms", "wait·run", "KV pages held", "", right=("rooms", "wait·run"))
    rows = sorted(known.sections["servers"].values(), key=lambda row: (row["role"] != "prefill", row["role"], row["instance"]))
    for row in rows[:limit]:
        pages = row["pages"]
        held = (pages["total"] - pages["free"]) / pages["total"] if pages["total"] else 0.0
        state = row["state"] if row["state"] == row["why"] or not row["why"] else f"{row['state']}: {row['why']}"
        table.add_row(
            Text.assemble(
                (f"{row['role']:8}", ROLE_STYLES[row["role"]]), row["instance"] or "?", f"  {row['address']}" if row.get("address") else ""
            ),
            Text(state[:60], style="" if row["state"] == "in use" else "yellow"),
            f"{row['rooms']:,}",
            f"{row['waiting']}·{row['running']}",
            Text("█" * round(BAR * held) + "░" * (BAR - round(BAR * held)), style=ROLE_STYLES[row["role"]]),
            f"{pages['free']:,} of {pages['total']:,} free" + (f", {pages['quarantined']:,} quarantined" if pages["quarantined"] else ""),
        )
    paths = sorted({(row["transport"], row["gb_per_s"]) for row in known.sections["pairs"].values()}, key=lambda path: path[1])
    told = f"{len(known.sections['pairs'])} pairs" + (f", slowest {paths[0][0]} {paths[0][1]:.2f} GB/s" if paths else "")
    return Group(table, Text(told, style="dim"))


def _latencies(known: Known) -> Text:
    points = [known.sections["series"][key] for key in sorted(known.sections["series"], key=int)]
    text = Text()
    for name, p50, p99 in (("TTFT", 3, 4), ("ITL", 5, 6)):
        last = next((point for point in reversed(points) if point[p50] is not None), None)
        told = f"p50 {span(last[p50])}  p99 {span(last[p99])}" if last else "-"
        text.append(f"{name:5}", "dim").append(sparks([point[p99] for point in points[-40:]]), "blue").append(f"  {told}\n")
    text.right_crop(1)
    return text


def sparks(values: Sequence[float | None]) -> str:
    """One mark a value, on a logarithmic scale between the least and the largest; a gap where there is none."""
    logs = [math.log10(value) for value in values if value]
    if not logs:
        return " " * len(values)
    low, width = min(logs), max(max(logs) - min(logs), 0.3)
    return "".join(SPARKS[min(7, int(8 * (math.log10(value) - low) / width))] if value else " " for value in values)


def _live(known: Known, limit: int) -> RenderableType:
    rows = sorted(known.sections["live"].items(), key=lambda item: item[1]["accepted"])
    if not rows:
        return Text("no room is open", style="dim")
    table = _table("open room", "state", "in it", "age", "prompt", "tokens", "on", right=("in it", "age", "prompt", "tokens"))
    now = known.sections["now"]
    for name, row in rows[:limit]:
        ages = [span(max(0, now - row[key])) for key in ("entered", "accepted")]
        table.add_row(name, _state(row["state"]), *ages, f"{row['prompt']:,}", f"{row['tokens']:,}", " → ".join(row["servers"]))
    return table


def _state(name: str) -> Text:
    return Text(STATE_NAMES.get(name, name.lower()), style=STATE_STYLES.get(name, ""))


def _ended(requests: Sequence[Row], choice: Choice, limit: int) -> RenderableType:
    if not requests:
        return Text("none failed" if choice.only_failed else "no request has ended yet", style="dim")
    table = _table("", "finished", "outcome", "prompt", "tokens", "TTFT", "ITL", "total", right=("prompt", "tokens", "TTFT", "ITL", "total"))
    place = next((index for index, row in enumerate(requests) if row["n"] == choice.selected), 0)
    first = max(0, min(place - limit // 2, len(requests) - limit))
    for row in requests[first : first + limit]:
        chosen = row["n"] == choice.selected
        table.add_row(">" if chosen else " ", row["name"], *_outcome(row), style="reverse" if chosen else "")
    return table


def _outcome(row: Row) -> list[Any]:
    failure = row.get("failure")
    outcome = Text(f"{failure['cause']} ({failure['origin']})", style="red") if failure else Text(row["finish"] or "ended")
    times = [span(row[name]) if row[name] else "-" for name in ("ttft", "itl")]
    return [outcome, f"{row['prompt']:,}", f"{row['tokens']:,}", *times, span(row["total"])]


def waterfall(row: Row) -> RenderableType:
    """Where the time of one request went; as `baton chat --report` draws it."""
    table = _table("state", "from ms", "ms", "", right=("from ms", "ms"))
    for name, start, duration in row["states"]:
        table.add_row(_state(name), f"{start:.1f}", f"{duration:.1f}", Text(bar(start, duration, row["total"]), style=STATE_STYLES.get(name, "")))
    told = [f"request {row['name']} on {' → '.join(row['servers'])}"]
    if row["ttft"]:
        told.append(f"first token after {row['ttft']:.1f} ms, total {row['total']:.1f} ms")
    if moved := row.get("transfer"):
        told.append(f"{moved['bytes']:,} bytes in {moved['puts']} puts over {moved['transport']}, {moved['exposed']:.2f} ms after the last layer")
    if failure := row.get("failure"):
        told.append(f"{failure['cause']}: ended by {failure['origin']} in {failure['stage']}: {failure['text']}")
    return Group(Text(told[0], style="bold"), table, *(Text(text, overflow="fold") for text in told[1:]))


def span(ms: float) -> str:
    """Milliseconds in few characters."""
    if ms < 10:
        return f"{ms:.2f} ms"
    if ms < 1000:
        return f"{ms:.0f} ms"
    return f"{ms / 1000:.1f} s" if ms < 60_000 else f"{ms / 60_000:.1f} min"
