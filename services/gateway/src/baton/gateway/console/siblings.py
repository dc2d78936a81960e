"""What the other processes of this gateway have said of themselves: each has rooms and requests of its own. Pure.

The processes run on one host and share its monotonic clock: their times need no translation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.console.history import NUM_FAILED_KEPT, NUM_KEPT, Cause
from baton.gateway.console.seconds import Window

#: Requests of other processes are numbered from here on, in the order in which this process learnt of them.
FIRST_NUMBER = 2**40
#: As many windows as the charts have, and one that begins.
NUM_WINDOWS = 61


@dataclass(slots=True)
class Foreign:
    """A request that has ended in another process. row: as operators are told it."""

    number: int
    at_ms: int
    row: dict[str, Any]
    rows: dict[bool, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Part:
    """One other process, as it last described itself. num_heard: how many of its requests had ended by then."""

    started: int = 0
    num_heard: int = 0
    live: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)
    causes: Counter[Cause] = field(default_factory=Counter)
    rooms: Mapping[str, int] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)

    def window(self, number: int) -> Window:
        return self.windows.get(number, Window())


class Siblings:
    """Memory is bounded as the history's is, for each process."""

    def __init__(self, indexes: Sequence[int] = ()) -> None:
        self._parts = {index: Part() for index in indexes}
        self._away: set[int] = set()
        self._ended: deque[Foreign] = deque(maxlen=(NUM_KEPT + NUM_FAILED_KEPT) * max(1, len(self._parts)))
        self.num_ended = 0

    @property
    def parts(self) -> list[Part]:
        """Those that have ever answered. One that is away keeps what it said last, but for its rooms."""
        return [part for part in self._parts.values() if part.counts]

    @property
    def away(self) -> list[int]:
        """Those that do not answer now."""
        return sorted(self._away)

    def num_rooms(self, address: str) -> int:
        """Rooms at that server, of all of them."""
        return sum(part.rooms.get(address, 0) for part in self._parts.values())

    def question(self, index: int) -> dict[str, int]:
        """What process `index` is to be asked: for what has ended since, and for all windows at first."""
        part = self._parts[index]
        return {"started": part.started, "after": part.num_heard}

    def take(self, index: int, answer: Mapping[str, Any]) -> None:
        """As `describe` made it."""
        self._away.discard(index)
        part = self._parts[index]
        if part.started != answer["started"]:  # a process that was started anew counts from nothing
            part = self._parts[index] = Part(answer["started"])
        part.num_heard = answer["counts"]["ended"]
        part.live, part.counts, part.rooms = answer["live"], answer["counts"], answer["rooms"]
        part.causes = Counter({(origin, stage, cause): count for origin, stage, cause, count in answer["causes"]})
        part.windows |= {int(number): _window(told) for number, told in answer["windows"].items()}
        for number in sorted(part.windows)[:-NUM_WINDOWS]:
            del part.windows[number]
        for row in answer["ended"]:
            self.num_ended += 1
            self._ended.append(Foreign(self.num_ended, row["at"], row | {"n": FIRST_NUMBER + self.num_ended}))

    def lost(self, index: int) -> None:
        """It does not answer: what was open there is not known."""
        self._away.add(index)
        part = self._parts[index]
        part.live, part.rooms = {}, {}
        if part.counts:
            part.counts = {**part.counts, "states": {}, "open": 0, "queued": 0}

    def after(self, number: int) -> list[Foreign]:
        """What is kept of those behind `number`."""
        return list(reversed(list(self._newer(number))))

    def _newer(self, number: int) -> Iterator[Foreign]:
        for one in reversed(self._ended):
            if one.number <= number:
                return
            yield one


def told_window(window: Window) -> list[Any]:
    """As it travels."""
    return [window.num, window.num_failed, window.num_tokens, [*window.ttft.items()], [*window.itl.items()]]


def _window(told: Sequence[Any]) -> Window:
    return Window(told[0], told[1], told[2], Counter(dict(told[3])), Counter(dict(told[4])))
