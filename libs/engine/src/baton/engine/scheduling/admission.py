"""The line in front of the KV pool: in the order of the requests' turns (first come first served, shifted by priority), with bounded overtaking."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton.engine.scheduling.sequence import Sequence

#: How far behind a blocked head a smaller request is looked for; bounds the cost of a step with a long line.
WINDOW = 64


class AdmissionQueue:
    """A head that does not fit yet may be passed by requests that do, `max_passes` times; then all wait until it fits."""

    def __init__(self, max_passes: int) -> None:
        self._max_passes = max_passes
        self._passes = 0
        # A dict keeps order, and takes a room out of its middle at once.
        self._line: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._line.values()))

    def push(self, sequence: Sequence) -> None:
        """Behind all whose turn is not later. A new head starts with all its passes."""
        behind = self._line and next(reversed(self._line.values())).request.turn > sequence.request.turn
        self._line[sequence.room] = sequence
        if behind:
            self._line = dict(sorted(self._line.items(), key=lambda item: item[1].request.turn))
            if sequence.room == next(iter(self._line)):
                self._passes = 0

    def remove(self, room: int) -> None:
        """Idempotent. A new head starts with all its passes."""
        if room in self._line:
            if room == next(iter(self._line)):
                self._passes = 0
            del self._line[room]

    def find(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """Who would be let in next, without letting it in."""
        for place, sequence in enumerate(self._line.values()):
            if place and (self._passes >= self._max_passes or place >= WINDOW):
                return None
            if fits(sequence):
                return sequence
        return None

    def take(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """Lets the next one in: it leaves the line."""
        sequence = self.find(fits)
        if sequence is None:
            return None
        if sequence.room != next(iter(self._line)):
            self._passes += 1
        self.remove(sequence.room)
        return sequence
