"""What the console shows at one moment, and what has changed since another. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from baton.gateway.console.history import History
from baton.gateway.console.rows import Names, Row, live_row, pair_row, server_row
from baton.gateway.console.seconds import NUM_SECONDS
from baton.gateway.fleet import Fleet
from baton.gateway.gate import Gate
from baton.gateway.rooms import RoomTable
from baton.gateway.withheld import without_addresses

#: The oldest open rooms are listed, the others counted: those that hang are among the oldest.
MAX_LIVE = 100
#: Pairs are as many as prefill servers times decode servers: of a larger fleet they are not listed one by one.
MAX_PAIRS = 1024
MAX_PROBLEMS = 20
MAX_CAUSES = 24
#: Charts have a point for so many seconds.
WINDOW_S = 5

#: Sections whose rows have keys: of these only the rows that changed are told.
KEYED = ("servers", "pairs", "live", "series")

View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a view is taken from. about: what never changes of this gateway."""

    rooms: RoomTable
    gate: Gate
    fleet: Fleet
    history: History
    about: Row
    names: Names


def look(sources: Sources, now: float, *, operator: bool) -> View:
    """All but the requests that have ended, which are told one by one. now: time.monotonic(), seconds."""
    return look_at_fleet(sources, operator=operator) | look_at_requests(sources, now, operator=operator)


def look_at_fleet(sources: Sources, *, operator: bool) -> View:
    """Servers report at most once a second, and of a large fleet this is most of the work."""
    fleet, names = sources.fleet, sources.names
    num_pairs = sum(w.leg.value == "prefill" for w in fleet.workers) * sum(w.leg.value == "decode" for w in fleet.workers)
    problems = fleet.problems()[:MAX_PROBLEMS] if num_pairs <= MAX_PAIRS else []
    return {
        "about": sources.about | {"ready": fleet.ready, "draining": sources.rooms.draining, "num_pairs": num_pairs},
        "servers": {names.place(worker.address): server_row(worker, operator=operator) for worker in fleet.workers},
        "pairs": {
            f"{names.place(prefill.address)}-{names.place(decode.address)}": pair_row(prefill, decode, path)
            for prefill, decode, path in (fleet.paths() if num_pairs <= MAX_PAIRS else ())
        },
        "problems": problems if operator else [without_addresses(text) for text in problems],
    }


def look_at_requests(sources: Sources, now: float, *, operator: bool) -> View:
    rooms, history = sources.rooms, sources.history
    states: Counter[str] = Counter(room.machine.state.name for room in rooms.open_rooms)
    last = int(now) // WINDOW_S
    return {
        "live": {sources.names.room(room.room): live_row(room, operator=operator) for room in islice(rooms.open_rooms, MAX_LIVE)},
        "counts": {
            "states": dict(states),
            "open": len(rooms),
            "queued": sources.gate.num_waiting,
            "max_rooms": rooms.max_rooms,
            "ended": history.num_ended,
            "failed": history.num_failed,
            "refused": history.num_refused,
            "retried": rooms.retries.total(),
        },
        "causes": [[*cause, count] for cause, count in history.causes.most_common(MAX_CAUSES)],
        # The newest two may still change; the others are in the view that is told whole.
        "series": {str(number): point(history, number) for number in range(last - 1, last + 1)},
    }


def series(history: History, now: float) -> dict[str, Sequence[float | None]]:
    """All points that are kept."""
    last = int(now) // WINDOW_S
    return {str(number): point(history, number) for number in range(last - NUM_SECONDS // WINDOW_S + 1, last + 1)}


def point(history: History, number: int) -> Sequence[float | None]:
    """[requests, failed ones, tokens, TTFT p50, p99, ITL p50, p99] of the seconds from number * WINDOW_S on."""
    window = history.seconds.window(number * WINDOW_S, WINDOW_S)
    return [
        window.num, window.num_failed, window.num_tokens, window.ttft_p50, window.ttft_p99, window.itl_p50, window.itl_p99,
    ]  # fmt: skip


def changes(before: View, after: View) -> View:
    """What makes `before` into `after`: sections that differ; of keyed ones {"set": rows that are new or differ, "gone": keys}."""
    found: View = {}
    for section, now in after.items():
        then = before.get(section)
        if section not in KEYED:
            if now != then:
                found[section] = now
            continue
        rows = {key: row for key, row in now.items() if then is None or then.get(key) != row}
        gone = [key for key in then or () if key not in now] if section != "series" else []
        if rows or gone:
            found[section] = {"set": rows, "gone": gone}
    return found
