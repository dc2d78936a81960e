"""One room's way out: its source pages, its publication, its writes. Not thread safe: the exporter's lock guards it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from baton.engine.layout import KVLayout
from baton.engine.types import Extent, Failure, TransferPart, TransferStats
from baton.kvtransfer import Doorbell, TransferError, WriteHandle, WriteState
from baton.kvtransfer.spans import PageArray
from baton.prefill.publication import Publication, extents_to_ids
from baton.prefill.route_write import RouteWrite
from baton.prefill.write_parts import parts_of
from baton.workerkit import PageHash, PagesDigest


class HeldLayer(NamedTuple):
    """A layer of some pages of the prompt, as it was handed over. events: device events of each rank, as integers; none when the bytes are there."""

    layer: int
    first_page: int
    num_pages: int
    events: tuple[int, ...]


@dataclass(slots=True)
class RoomSend:
    """decode_instance_id: the only publisher that is believed. num_tokens: of the prompt. layout: of one rank's pool.

    writes: one for each route to decode, from the moment on when the room's publication is known. The room has ended when all of them have.
    ending: why it is being stopped, once it is. answer_revoke: decode asked for it and waits for Quiesced. broken: a write failed.
    """

    room: int
    decode_instance_id: str
    num_tokens: int
    layout: KVLayout
    publication: Publication | None = None
    writes: tuple[RouteWrite, ...] = ()
    extents: tuple[Extent, ...] = ()
    pages: PageArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    held: list[HeldLayer] = field(default_factory=list)
    #: Device events must outlive the writes that wait for them.
    events: list[object] = field(default_factory=list)
    first_token: int | None = None
    has_started: bool = False
    ending: Failure | None = None
    answer_revoke: bool = False
    broken: bool = False
    last_layer_ns: int = 0
    #: The first layer of the chunk under way that no digest was begun of.
    undigested_layer: int = 0
    #: The last that the digests' thread was given to read ahead.
    reading: Future[None] | None = None
    #: Of each `post` on every way, in order.
    posted_layers: list[int] = field(default_factory=list)

    def set_source(self, extents: Sequence[Extent]) -> None:
        self.extents = tuple(extents)
        self.pages = extents_to_ids(self.extents)

    def open(self, publication: Publication, page_hashes: Sequence[PageHash]) -> None:
        """Opens a write on every way to decode. Raises TransferError, and then none is left open."""
        link = publication.link
        writes: list[RouteWrite] = []
        try:
            for way, doorbell in zip(link.ways, publication.doorbells, strict=True):
                page_hash = page_hashes[way.route.source_rank]
                writes.append(RouteWrite(way.route, way.peer.begin(self.room), self.layout, link.layout, page_hash, doorbell))
        except TransferError:
            for write in writes:
                write.handle.cancel()
            raise
        self.publication, self.writes = publication, tuple(writes)

    @property
    def can_post(self) -> bool:
        return bool(self.writes) and self.ending is None and not self.broken

    def owns(self, handle: WriteHandle) -> bool:
        return any(write.handle is handle for write in self.writes)

    @property
    def state(self) -> WriteState:
        """Of all writes together: OPEN while one is, DONE when every doorbell rang, FAILED if one did."""
        states = {write.handle.state for write in self.writes}
        return next(state for state in (WriteState.FAILED, WriteState.OPEN, WriteState.QUIESCED, WriteState.DONE) if state in states)

    def post(self, held: HeldLayer) -> bool:
        """Posts one layer's pages of the prompt, those that decode does not hold already, on every way. True if there were any."""
        assert self.publication is not None
        layer, first, count, events = held
        first, count = self._beyond_resident(first, count)
        if not count:
            return False
        for write in self.writes:
            write.post(layer, self.pages, self.publication.pages, first, count, events)
        self.posted_layers.append(layer)
        return True

    def doorbells(self) -> list[Doorbell]:
        """The room's last words, one for each write. Where decode asked for digests of what was sent they are computed here: it takes a while."""
        assert self.publication is not None
        assert self.first_token is not None
        return [
            Doorbell(
                room=self.room,
                generation=self.publication.generation,
                num_tokens=self.num_tokens,
                first_token=self.first_token,
                digest=self._digest(write).value() if self.publication.digest else 0,
                has_digest=self.publication.digest,
                last_layer_ns=self.last_layer_ns,
            )
            for write in self.writes
        ]

    def digest_ahead(self, layers: range, first_page: int, num_pages: int, ready: Sequence[object]) -> None:
        """Starts to read pages of the prompt for the digests, where decode asked for them. ready: of each of our ranks. On the digests' thread."""
        assert self.publication is not None
        first, count = self._beyond_resident(first_page, num_pages)
        for write in self.writes:
            self._digest(write).ahead(layers, first - self.publication.resident_pages, count, ready[write.route.source_rank])

    def digests_are_ready(self) -> bool:
        """Whether `doorbells` would not wait: everything was read ahead, and the digests' thread is done with this room."""
        return self.reading is not None and self.reading.done() and all(write.has_digest_ready() for write in self.writes)

    def _digest(self, write: RouteWrite) -> PagesDigest:
        """Of all that goes over one way."""
        assert self.publication is not None
        first = self.publication.resident_pages
        return write.digest(self.extents, first, self.layout.pages_for(self.num_tokens) - first)

    def _beyond_resident(self, first: int, count: int) -> tuple[int, int]:
        """What of pages [first, first + count) of the prompt decode does not hold already."""
        assert self.publication is not None
        skip = min(max(self.publication.resident_pages - first, 0), count)
        return first + skip, count - skip

    def finish(self, doorbells: Sequence[Doorbell]) -> None:
        """Flush and ring, on every way. Raises what the handles' `finish` does."""
        for write, doorbell in zip(self.writes, doorbells, strict=True):
            write.handle.finish(write.doorbell, doorbell)

    def cancel(self) -> None:
        for write in self.writes:
            write.handle.cancel()

    def stats(self) -> TransferStats:
        """Writes over several ways run side by side: the longest says how long they were under way."""
        assert self.publication is not None
        handles = [write.handle for write in self.writes]
        done = max(handle.done_time or time.monotonic() for handle in handles)
        began = [handle.first_post_time for handle in handles if handle.first_post_time is not None]
        return TransferStats(
            transport=self.publication.link.transport,
            num_bytes=sum(handle.num_bytes for handle in handles),
            num_puts=sum(handle.num_puts for handle in handles),
            duration_s=max(0.0, done - min(began)) if began else 0.0,
            exposed_s=max(0.0, done - self.last_layer_ns / 1e9),
            digest=self.publication.digest,
            busy_s=max(handle.busy_s for handle in handles),
            parts=self._parts(handles, round(min(began) * 1e9)) if began else (),
        )

    def _parts(self, handles: Sequence[WriteHandle], first_ns: int) -> tuple[TransferPart, ...]:
        parts = [part for queue, handle in enumerate(handles) for part in parts_of(queue, self.posted_layers, handle.parts(), first_ns)]
        return tuple(sorted(parts, key=lambda part: part.begin_s))
