"""All rooms that are open here, how many may be, and how those before them ended."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from baton.gateway.errors import DrainingError, OverloadedError
from baton.gateway.live_room import LiveRoom
from baton.servicekit import FailedRoom
from baton.wire.status import origin_name, stage_name
from baton.wire.v1 import common_pb2

MAX_ROOM = 2**63 - 1


class RoomTable:
    """Owns every LiveRoom from its opening until no leg of it is left."""

    def __init__(self, max_rooms: int) -> None:
        self.max_rooms = max_rooms
        #: Called when a place may have become free.
        self.on_free: Callable[[], None] = lambda: None
        #: Called with each room that has no leg left.
        self.on_closed: Callable[[LiveRoom], None] = lambda room: None
        self._rooms: dict[int, LiveRoom] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        #: "success", or (origin, stage, cause) of a failure -> how many.
        self.outcomes: Counter[str | tuple[str, str, str]] = Counter()
        self.failures: Counter[FailedRoom] = Counter()
        self.counters: Counter[str] = Counter()
        #: (origin, stage, cause) of a failure that was answered by another room -> how many.
        self.retries: Counter[tuple[str, str, str]] = Counter()
        self._num_between = 0

    def __len__(self) -> int:
        return len(self._rooms) + self._num_between

    @property
    def open_rooms(self) -> Collection[LiveRoom]:
        """Oldest first; of this moment: it changes with every room."""
        return self._rooms.values()

    @property
    def free(self) -> int:
        """Rooms that may be opened now."""
        return max(0, self.max_rooms - len(self))

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """A request has left its room and may get another: it keeps its place, and a drain waits for it."""
        self._num_between += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_between -= 1
            self._note_idle()

    def check_capacity(self) -> None:
        """Raises DrainingError, OverloadedError."""
        if self.draining:
            raise DrainingError
        if not self.free:
            raise OverloadedError(f"{len(self)} requests are open, the limit is {self.max_rooms} (--max-rooms): try again later")

    def draw(self) -> int:
        """A room number that nobody can guess and that is not in use: random, 63 bit, not 0."""
        while True:
            room = secrets.randbelow(MAX_ROOM) + 1
            if room not in self._rooms:
                return room

    def open(self, make: Callable[[int, Callable[[LiveRoom], None]], LiveRoom], *, again: bool = False) -> LiveRoom:
        """Makes a room with a fresh number, and begins it. Raises DrainingError, OverloadedError, except for a request that was taken before."""
        if not again:
            self.check_capacity()
        room = make(self.draw(), self._on_closed)
        self._rooms[room.room] = room
        self._idle.clear()
        room.begin()
        return room

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no room is open; False when the time is over first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def abort_all(self, failure: common_pb2.Failure) -> int:
        """Ends every open room; how many there were."""
        rooms = list(self._rooms.values())
        for room in rooms:
            room.cancel(failure)
        return len(rooms)

    def _on_closed(self, room: LiveRoom) -> None:
        self._rooms.pop(room.room, None)
        failure = room.failure
        key = "success" if failure is None else (origin_name(failure.origin), stage_name(failure.stage), failure.cause)
        self.outcomes[key] += 1
        if failure is not None:
            self.failures[
                FailedRoom(origin_name(failure.origin), stage_name(failure.stage), failure.cause, room.told_by, len(room.servers) == 2)
            ] += 1
        self.counters["events_repeated"] += room.num_repeated_events
        self.on_closed(room)
        self._note_idle()

    def _note_idle(self) -> None:
        if not len(self):
            self._idle.set()
        self.on_free()
