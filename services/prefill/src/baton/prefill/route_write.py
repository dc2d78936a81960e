"""What one room writes over one route, from one of our ranks to one of decode's. Not thread safe: the exporter's lock guards it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.layout import KVLayout
from baton.engine.types import Extent
from baton.kvtransfer import Route, SpanArray, WriteHandle, route_spans
from baton.kvtransfer.routes import own_heads
from baton.kvtransfer.spans import PageArray
from baton.workerkit import PageHash, PagesDigest


@dataclass(slots=True)
class _Chunk:
    """Spans of layer 0 for one range of pages: another layer's are the same, `stride` a layer further."""

    first: int
    count: int
    spans: SpanArray
    stride: npt.NDArray[np.int64]


@dataclass(slots=True)
class RouteWrite:
    """source, target: layouts of the two ranks' pools. page_hash: of the source rank's pages. doorbell: the slot that this route rings."""

    route: Route
    handle: WriteHandle
    source: KVLayout
    target: KVLayout
    page_hash: PageHash
    doorbell: int
    _chunk: _Chunk | None = None
    _digest: PagesDigest | None = None

    def post(self, layer: int, source_pages: PageArray, target_pages: PageArray, first: int, count: int, events: tuple[int, ...]) -> None:
        """Queues pages [first, first + count) of the prompt. events: of each of our ranks, or none. Raises what the handle's `post` does."""
        chunk = self._chunk
        if chunk is None or chunk.first != first or chunk.count != count:
            chunk = self._chunk = self._cut(source_pages, target_pages, first, count)
        self.handle.post(chunk.spans + layer * chunk.stride, events[self.route.source_rank] if events else None)

    def _cut(self, source_pages: PageArray, target_pages: PageArray, first: int, count: int) -> _Chunk:
        spans = route_spans(self.route, self.source, self.target, 0, source_pages, target_pages, first, count)
        return _Chunk(first, count, spans, np.array([2 * self.source.plane_bytes, 2 * self.target.plane_bytes, 0], dtype=np.int64))

    def digest(self, extents: Iterable[Extent], first: int, count: int) -> PagesDigest:
        """Of what goes over this route, pages [first, first + count): the same bytes in the same order as decode reads them. The digests' thread."""
        if self._digest is None:
            heads = own_heads(self.route.source_head, self.route.num_heads, self.source)
            self._digest = self.page_hash.open(extents, first, count, heads)
        return self._digest

    def has_digest_ready(self) -> bool:
        """Whether the digest was begun and its value is there. Not while the digests' thread is at it."""
        return self._digest is not None and self._digest.is_ready()
