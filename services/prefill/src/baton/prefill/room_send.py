"""One room's way out: its source pages, its publication, its writes. Not thread safe: the exporter's lock guards it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.engine.layout import KVLayout
from baton.engine.types import Extent, Failure, TransferStats
from baton.kvtransfer import Doorbell, SpanArray, WriteHandle, spans_for
from baton.kvtransfer.spans import PageArray
from baton.prefill.publication import Publication, extents_to_ids
from baton.workerkit import PageHash


@dataclass(slots=True)
class _Chunk:
    """Spans of layer 0 for one range of pages: another layer's are the same, some planes further."""

    first: int
    count: int
    spans: SpanArray


@dataclass(slots=True)
class RoomSend:
    """decode_instance_id: the only publisher that is believed. num_tokens: of the prompt.

    ending: why it is being stopped, once it is. answer_revoke: decode asked for it and waits for Quiesced.
    """

    room: int
    decode_instance_id: str
    num_tokens: int
    layout: KVLayout
    publication: Publication | None = None
    handle: WriteHandle | None = None
    extents: tuple[Extent, ...] = ()
    pages: PageArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    #: Handed over before the publication came: (layer, first page, pages, device event).
    held: list[tuple[int, int, int, int | None]] = field(default_factory=list)
    #: Device events must outlive the writes that wait for them.
    events: list[object] = field(default_factory=list)
    first_token: int | None = None
    is_finished: bool = False
    has_started: bool = False
    ending: Failure | None = None
    answer_revoke: bool = False
    broken: bool = False
    last_layer_ns: int = 0
    _chunk: _Chunk | None = None

    def set_source(self, extents: Sequence[Extent]) -> None:
        self.extents = tuple(extents)
        self.pages = extents_to_ids(self.extents)

    @property
    def can_post(self) -> bool:
        return self.handle is not None and self.ending is None and not self.broken

    def post(self, layer: int, first: int, count: int, ready: int | None) -> bool:
        """Posts one layer's pages [first, first + count) of the prompt, those that decode does not hold already. True if anything was posted."""
        assert self.publication is not None
        assert self.handle is not None
        skip = max(self.publication.resident_pages - first, 0)
        first, count = first + skip, count - skip
        if count <= 0:
            return False
        self.handle.post(self._spans(layer, first, count), ready)
        return True

    def _spans(self, layer: int, first: int, count: int) -> SpanArray:
        assert self.publication is not None
        target = self.publication.link.layout
        chunk = self._chunk
        if chunk is None or (chunk.first, chunk.count) != (first, count):
            chunk = self._chunk = _Chunk(first, count, spans_for(self.layout, target, 0, self.pages, self.publication.pages, first, count))
        shift = np.array([2 * layer * self.layout.plane_bytes, 2 * layer * target.plane_bytes, 0], dtype=np.int64)
        return chunk.spans + shift

    def doorbell(self, page_hash: PageHash | None) -> Doorbell:
        """The room's last word. With a hash, the digest of the source pages that were sent is computed here: it takes a while."""
        assert self.publication is not None
        assert self.first_token is not None
        value = 0
        if page_hash is not None:
            first = self.publication.resident_pages
            count = self.layout.pages_for(self.num_tokens) - first
            value = page_hash.of(self.extents, first, count)
        return Doorbell(
            room=self.room,
            generation=self.publication.generation,
            num_tokens=self.num_tokens,
            first_token=self.first_token,
            digest=value,
            has_digest=page_hash is not None,
            last_layer_ns=self.last_layer_ns,
        )

    def stats(self) -> TransferStats:
        assert self.publication is not None
        assert self.handle is not None
        done = self.handle.done_time or time.monotonic()
        first = self.handle.first_post_time
        return TransferStats(
            transport=self.publication.link.peer.transport,
            num_bytes=self.handle.num_bytes,
            num_puts=self.handle.num_puts,
            duration_s=0.0 if first is None else max(0.0, done - first),
            exposed_s=max(0.0, done - self.last_layer_ns / 1e9),
            digest=self.publication.digest,
            busy_s=self.handle.busy_s,
        )
