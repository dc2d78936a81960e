"""What the console shows at one moment, and what has changed since another. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from baton.gateway.console.history import History
from baton.gateway.console.rows import Names, Row, live_row, pair_row, server_row, withheld
from baton.gateway.console.seconds import NUM_SECONDS, Window, percentile
from baton.gateway.console.siblings import Siblings
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
NUM_WINDOWS = NUM_SECONDS // WINDOW_S
COUNTS = ("open", "queued", "max_rooms", "ended", "failed", "refused", "retried")

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
    #: Other processes of this gateway, where there are any.
    siblings: Siblings = field(default_factory=Siblings)

    def window(self, number: int) -> Window:
        """Seconds number * WINDOW_S and the following, of all processes."""
        return sum((part.window(number) for part in self.siblings.parts), self.history.seconds.window(number * WINDOW_S, WINDOW_S))


def look(sources: Sources, now: float, *, operator: bool) -> View:
    """All but the requests that have ended, which are told one by one. now: time.monotonic(), seconds."""
    return look_at_fleet(sources, operator=operator) | look_at_requests(sources, now, operator=operator)


def look_at_fleet(sources: Sources, *, operator: bool) -> View:
    """Servers report at most once a second, and of a large fleet this is most of the work."""
    fleet, names = sources.fleet, sources.names
    num_pairs = sum(w.leg.value == "prefill" for w in fleet.workers) * sum(w.leg.value == "decode" for w in fleet.workers)
    problems = fleet.problems()[:MAX_PROBLEMS] if num_pairs <= MAX_PAIRS else []
    return {
        "about": sources.about | {"ready": fleet.ready, "draining": sources.rooms.draining, "num_pairs": num_pairs, "away": sources.siblings.away},
        "servers": {
            names.place(worker.address): server_row(worker, sources.siblings.num_rooms(worker.address), operator=operator) for worker in fleet.workers
        },
        "pairs": {
            f"{names.place(prefill.address)}-{names.place(decode.address)}": pair_row(prefill, decode, path)
            for prefill, decode, path in (fleet.paths() if num_pairs <= MAX_PAIRS else ())
        },
        "problems": problems if operator else [without_addresses(text) for text in problems],
    }


def look_at_requests(sources: Sources, now: float, *, operator: bool) -> View:
    own, parts = own_requests(sources), sources.siblings.parts
    causes: Counter[tuple[str, str, str]] = Counter(sources.history.causes)
    for part in parts:
        causes.update(part.causes)
    live = dict(islice(sorted(_all(own["live"], [part.live for part in parts]).items(), key=lambda item: item[1]["accepted"]), MAX_LIVE))
    last = int(now) // WINDOW_S
    return {
        "live": live if operator else {name: withheld(row) for name, row in live.items()},
        "counts": {
            "states": dict(sum((Counter(part.counts["states"]) for part in parts), Counter(own["counts"]["states"]))),
            **{name: sum((part.counts[name] for part in parts), own["counts"][name]) for name in COUNTS},
        },
        "causes": [[*cause, count] for cause, count in causes.most_common(MAX_CAUSES)],
        # The newest two may still change; the others are in the view that is told whole.
        "series": {str(number): point(sources, number) for number in range(last - 1, last + 1)},
    }


def own_requests(sources: Sources) -> View:
    """What this process has of its own, as operators are told it."""
    rooms, history = sources.rooms, sources.history
    return {
        "live": {sources.names.room(room.room): live_row(room) for room in islice(rooms.open_rooms, MAX_LIVE)},
        "counts": {
            "states": dict(Counter(room.machine.state.name for room in rooms.open_rooms)),
            "open": len(rooms),
            "queued": sources.gate.num_waiting,
            "max_rooms": rooms.max_rooms,
            "ended": history.num_ended,
            "failed": history.num_failed,
            "refused": history.num_refused,
            "retried": rooms.retries.total(),
        },
    }


def _all(own: Mapping[str, Row], others: Sequence[Mapping[str, Row]]) -> dict[str, Row]:
    return {name: row for rows in (own, *others) for name, row in rows.items()}


def series(sources: Sources, now: float) -> dict[str, Sequence[float | None]]:
    """All points that are kept."""
    last = int(now) // WINDOW_S
    return {str(number): point(sources, number) for number in range(last - NUM_WINDOWS + 1, last + 1)}


def point(sources: Sources, number: int) -> Sequence[float | None]:
    """[requests, failed ones, tokens, TTFT p50, p99, ITL p50, p99] of the seconds from number * WINDOW_S on."""
    window = sources.window(number)
    latencies = [percentile(counts, share) for counts in (window.ttft, window.itl) for share in (0.5, 0.99)]
    return [window.num, window.num_failed, window.num_tokens, *latencies]


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
