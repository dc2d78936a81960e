"""A transfer between two engines of one process, for tests: the shipped fake of both ports. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.engine.layout import KVLayout
from baton.engine.ports import (
    ExportEvent,
    Freed,
    ImportEvent,
    Landed,
    LandingFailed,
    Published,
    PublishedSlots,
    Reservation,
    SendDone,
    SendFailed,
    SendStarted,
)
from baton.engine.types import Extent, Failure, Request, TransferStats


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's pool: its memory and its shape."""

    memory: memoryview
    layout: KVLayout


@dataclass(slots=True)
class _Room:
    expected: bool = False
    reservation: Reservation | None = None
    source: list[int] = field(default_factory=list)
    num_bytes: int = 0
    num_puts: int = 0
    #: (layer, first page, pages) that were handed over before the reservation was known.
    held: list[tuple[int, int, int]] = field(default_factory=list)
    # The sender has said its last word (SendDone or SendFailed), the receiver's lease has ended (Landed or Freed).
    sent: bool = False
    landed: bool = False
    declined: Failure | None = None


class MemoryLink:
    """Joins one prefill and one decode engine: bytes are copied when a layer is handed over, events arrive at the next poll.

    `hold()` keeps all events back until `release()`, as a slow peer would; bytes are still copied at once, also into rooms whose
    receiver has given up: what a late one-sided write does.
    """

    def __init__(self, source: Side, target: Side) -> None:
        self._source = source
        self._target = target
        self._rooms: dict[int, _Room] = {}
        self._held: list[Callable[[], None]] | None = None
        self.layers_handed_over: list[tuple[int, int, int, int]] = []
        self.exporter = MemoryExporter(self)
        self.importer = MemoryImporter(self)

    def hold(self) -> None:
        self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        for deliver in held:
            deliver()

    def open_rooms(self) -> list[int]:
        """Rooms whose sender or receiver still waits for a last word."""
        return [number for number, room in self._rooms.items() if (room.expected and not room.sent) or (room.reservation and not room.landed)]

    def room(self, number: int) -> _Room:
        return self._rooms.setdefault(number, _Room())

    def to_exporter(self, event: ExportEvent) -> None:
        self._deliver(lambda: self.exporter.events.append(event))

    def to_importer(self, event: ImportEvent) -> None:
        self._deliver(lambda: self.importer.events.append(event))

    def match(self, number: int) -> None:
        """Both halves of a room are known: the sender learns where to write."""
        room = self.room(number)
        if room.declined is not None and room.reservation is not None and not room.landed:
            room.landed = True
            self.to_importer(LandingFailed(number, room.declined))
            self.to_importer(Freed(number))
        elif room.expected and room.reservation is not None and not room.sent:
            self.to_exporter(PublishedSlots(number, room.reservation.resident_tokens))
            held, room.held = room.held, []
            for layer, first, count in held:
                self.hand_over(number, layer, first, count)

    def end_sending(self, number: int, failure: Failure) -> None:
        """The sender gives up, by itself or revoked: both sides get their last word, once."""
        room = self.room(number)
        room.declined = failure
        if room.expected and not room.sent:
            room.sent = True
            self.to_exporter(SendFailed(number, failure))
        self.match(number)

    def hand_over(self, number: int, layer: int, first: int, count: int) -> None:
        """Pages of a layer are computed: copied now, or held until the receiver has said where to."""
        room = self.room(number)
        if room.reservation is None:
            room.held.append((layer, first, count))
            return
        skip = max(room.reservation.resident_tokens // self._source.layout.page_size - first, 0)
        if count > skip:
            if not room.num_puts:
                self.to_exporter(SendStarted(number))
            self.copy(number, room.reservation, layer, first + skip, count - skip)

    def copy(self, number: int, reservation: Reservation, layer: int, first: int, count: int) -> None:
        room = self.room(number)
        target = _pages(reservation.pages)
        self.layers_handed_over.append((number, layer, first, count))
        for page in range(first, first + count):
            for values in (False, True):
                start = self._source.layout.offset(layer, values, room.source[page])
                end = self._target.layout.offset(layer, values, target[page])
                size = self._source.layout.page_bytes
                self._target.memory[end : end + size] = self._source.memory[start : start + size]
                room.num_bytes += size
            room.num_puts += 2

    def _deliver(self, deliver: Callable[[], None]) -> None:
        if self._held is None:
            deliver()
        else:
            self._held.append(deliver)


class MemoryExporter:
    """The KVExporter of a MemoryLink."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link
        self.events: list[ExportEvent] = []

    def expect(self, request: Request) -> None:
        self._link.room(request.room).expected = True
        self._link.match(request.room)

    def start(self, room: int, pages: Sequence[Extent], num_tokens: int) -> None:
        self._link.room(room).source = _pages(pages)

    def layer_done(self, layer: int, ranges: Sequence[tuple[int, int, int]], ready: object | None = None) -> None:
        for room, first, count in ranges:
            self._link.hand_over(room, layer, first, count)

    def finish(self, room: int, first_token: int) -> None:
        state = self._link.room(room)
        if state.sent:
            return
        state.sent = state.landed = True
        self._link.to_exporter(SendDone(room, TransferStats("memory", state.num_bytes, state.num_puts, 0.0, 0.0, digest=False)))
        self._link.to_importer(Landed(room, first_token, digest_checked=False, exposed_s=0.0))

    def abort(self, room: int, failure: Failure) -> None:
        self._link.end_sending(room, failure)

    def poll(self) -> list[ExportEvent]:
        events, self.events = self.events, []
        return events

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Tests poll."""


class MemoryImporter:
    """The KVImporter of a MemoryLink."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link
        self.events: list[ImportEvent] = []
        self.quarantined = 0

    def publish(self, request: Request, reservation: Reservation) -> None:
        self._link.room(request.room).reservation = reservation
        self._link.to_importer(Published(request.room))
        self._link.match(request.room)

    def abort(self, room: int, failure: Failure) -> None:
        self._link.end_sending(room, failure)

    def poll(self) -> list[ImportEvent]:
        events, self.events = self.events, []
        return events

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Tests poll."""

    def quarantined_pages(self) -> int:
        return self.quarantined


def _pages(extents: Sequence[Extent]) -> list[int]:
    return [page for extent in extents for page in range(extent.first, extent.end)]
