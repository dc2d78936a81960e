"""Rooms that wait for another room's prompt: the second and later answers to one prompt."""

from __future__ import annotations

from baton.engine.scheduling.sequence import Sequence


class ForkBook:
    """Forks by the room whose prompt they wait for, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, Sequence]] = {}
        self._source: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._source)

    def add(self, sequence: Sequence) -> None:
        source = sequence.request.fork_of
        self._waiting.setdefault(source, {})[sequence.room] = sequence
        self._source[sequence.room] = source

    def take(self, source: int) -> list[Sequence]:
        """Those that waited for `source`: they wait no more."""
        taken = list(self._waiting.pop(source, {}).values())
        for sequence in taken:
            del self._source[sequence.room]
        return taken

    def remove(self, room: int) -> None:
        """Idempotent."""
        source = self._source.pop(room, None)
        if source is not None:
            del self._waiting[source][room]
            if not self._waiting[source]:
                del self._waiting[source]
