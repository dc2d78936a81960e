"""The digest of one room's pages, which both sides compute and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from baton.engine.layout import KVLayout
from baton.engine.types import Extent
from baton.workerkit.runs import digest_runs


class PagesDigest(Protocol):
    """The digest of some pages that are being computed. One thread at a time."""

    def prepare(self) -> None:
        """Whatever can be done before a page is complete. Waits for nothing; not needed, but then the other calls do it."""

    def ahead(self, layers: range, first: int, count: int, ready: object) -> None:
        """Pages [first, first + count) of these, in consecutive layers, are complete when `ready`, an event of their device, has fired. Waits for
        nothing. Pages may come again, and count as they are then; those that never came are read with `value`."""

    def is_ready(self) -> bool:
        """Whether `value` would return at once."""

    def value(self) -> int:
        """64 bits, once all pages are complete. Waits for memory, not for a peer."""


class PageHash(Protocol):
    """Equal KV gives equal digests, however the pages are scattered. Two servers can compare digests of one `name` only."""

    @property
    def name(self) -> str: ...

    def of(self, extents: Iterable[Extent], first: int, count: int, heads: tuple[int, int] | None = None) -> int:
        """64 bits over pages [first, first + count) of the prompt whose pages are `extents`: whole pages, all layers, keys and values. Waits
        for memory, not for a peer; any thread.

        heads: (first, count) of the pool's KV heads, of which alone the digest is: it equals that of a pool which has those heads only.
        None: all.
        """

    def open(self, extents: Iterable[Extent], first: int, count: int, heads: tuple[int, int] | None = None) -> PagesDigest:
        """The same, of pages that are not complete yet."""


#: Which bytes of each token count: (bytes of a token, first, end).
Columns = tuple[int, int, int]


class HostPageHash:
    """Of pages in host memory. hash_runs: the transfer library's digest of (offset, num_bytes) runs of the pool's region."""

    name = "xxh3-64"

    def __init__(self, layout: KVLayout, hash_runs: Callable[[Iterable[tuple[int, int]], Columns | None], int]) -> None:
        self._layout = layout
        self._hash_runs = hash_runs

    def of(self, extents: Iterable[Extent], first: int, count: int, heads: tuple[int, int] | None = None) -> int:
        layout = self._layout
        columns = None
        if heads is not None:
            head_bytes = layout.head_dim * layout.itemsize
            columns = (layout.num_kv_heads * head_bytes, heads[0] * head_bytes, sum(heads) * head_bytes)
        return self._hash_runs(digest_runs(layout, extents, first, count), columns)

    def open(self, extents: Iterable[Extent], first: int, count: int, heads: tuple[int, int] | None = None) -> PagesDigest:
        return _WhenAsked(partial(self.of, tuple(extents), first, count, heads))


class _WhenAsked:
    """Host memory is hashed as one stream of bytes, layer by layer: pages that come in chunks are not in its order."""

    def __init__(self, of: Callable[[], int]) -> None:
        self.value = of

    def prepare(self) -> None:
        pass

    def ahead(self, layers: range, first: int, count: int, ready: object) -> None:
        pass

    def is_ready(self) -> bool:
        return False
