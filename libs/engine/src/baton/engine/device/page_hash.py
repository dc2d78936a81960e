"""A digest of pages in device memory, computed where they are."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.device.seats import pages_from
from baton.engine.device.upload import upload_array
from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool
from baton.engine.types import Extent
from baton.kernels import page_digest


class DevicePageHash:
    """64 bits over a prompt's pages, on streams of its own: they wait for those, not for the engine's steps."""

    name = "mix64-pages"

    def __init__(self, pool: KVPool) -> None:
        layout = pool.layout
        self._planes = pool.planes.view(2 * layout.num_layers, layout.num_pages, layout.page_size, layout.num_kv_heads, -1)
        self._first_pages = torch.arange(len(self._planes), dtype=torch.int32, device=self._planes.device).unsqueeze(1) * layout.num_pages

    def of(self, extents: Iterable[Extent], first: int, count: int, heads: tuple[int, int] | None = None) -> int:
        """Pages [first, first + count) of the prompt, layer by layer, keys before values. heads: (first, count) of the pool's KV heads, of which
        alone the digest is; None: all. The pages must be complete: computed and read by the host's last step, or landed."""
        return self.open(extents, first, count, heads).value()

    def open(self, extents: Iterable[Extent], first: int, count: int, heads: tuple[int, int] | None = None) -> DevicePagesDigest:
        """The same, of pages that are not complete yet. Raises ValueError where the extents hold fewer."""
        table = PageTable()
        for extent in extents:
            table.append(extent)
        pages = pages_from(table, first)[:count]
        if len(pages) != count:
            raise ValueError(f"pages [{first}, {first + count}) asked for, but the extents hold {table.num_pages} pages")
        return DevicePagesDigest(self._planes, self._first_pages, np.asarray(pages, dtype=np.int32), heads)


class DevicePagesDigest:
    """The digest of some pages that are being computed: what is known to be complete is read `ahead`, the rest with `value`. One thread at a time.

    planes: [2 * layers, pages of the pool, page size, kv heads, head dim]. first_pages: [2 * layers, 1] int32, the number of each plane's first page
    among all planes' pages. pages: numbers in the pool, in the prompt's order.
    """

    def __init__(self, planes: Tensor, first_pages: Tensor, pages: npt.NDArray[np.int32], heads: tuple[int, int] | None) -> None:
        self._planes, self._first_pages, self._pages, self._heads = planes, first_pages, pages, heads
        # Of its own: events that it waits for hold up no other room's digest.
        self._stream = torch.cuda.Stream(planes.device) if planes.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._index: Tensor | None = None  # [2 * layers, pages] int32 and their digests, int64, once one is asked for
        self._digests: Tensor | None = None
        self._is_known = np.zeros((len(planes), len(pages)), dtype=bool)

    @torch.inference_mode()
    def ahead(self, layers: range, first: int, count: int, ready: object) -> None:
        """Pages [first, first + count) of these, in consecutive layers: complete when `ready`, a torch.cuda.Event, has fired; None: now. Nothing
        waits for it here. Pages that come again (one that was filled in part) count as they are then."""
        if self._heads is not None or not count or not layers:
            return  # with `value`: some heads of a page are copied out first
        with self._streaming():
            if self._stream is not None and isinstance(ready, torch.cuda.Event):
                self._stream.wait_event(ready)
            self._read(2 * layers.start, 2 * layers.stop, first, first + count)

    @torch.inference_mode()
    def value(self) -> int:
        """Waits for the device."""
        if not len(self._pages):
            return 0
        with self._streaming():
            if self._heads is not None:
                digests = self._of_heads(*self._heads)
            else:
                for begin, end, first, last in self._unread():
                    self._read(begin, end, first, last)
                assert self._digests is not None
                digests = self._digests
            whole = page_digest(digests.view(torch.uint8).view(1, -1), torch.zeros(1, dtype=torch.int32, device=digests.device))
            return int(whole.item()) & ((1 << 64) - 1)

    def _streaming(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _unread(self) -> list[tuple[int, int, int, int]]:
        if self._digests is None:
            return [(0, len(self._planes), 0, len(self._pages))]
        return [] if self._is_known.all() else blocks(~self._is_known)

    def _read(self, begin: int, end: int, first: int, last: int) -> None:
        """The digests of pages [first, last) of planes [begin, end)."""
        if self._index is None or self._digests is None:
            self._index = self._first_pages + upload_array(self._pages, self._planes.device)
            self._digests = torch.empty_like(self._index, dtype=torch.int64)
        index = self._index[begin:end, first:last].reshape(-1)
        found = page_digest(_bytes_of(self._planes.flatten(0, 1)), index)
        if len(found) == self._digests.numel():
            self._digests = found.view_as(self._digests)
        else:
            self._digests[begin:end, first:last] = found.view(end - begin, last - first)
        self._is_known[begin:end, first:last] = True

    def _of_heads(self, first: int, count: int) -> Tensor:
        """[planes * pages] of some heads: plane by plane they are copied out, so that a page's lie side by side as in a pool without others."""
        index = upload_array(self._pages.astype(np.int64), self._planes.device)
        each = torch.arange(len(self._pages), dtype=torch.int32, device=self._planes.device)
        return torch.cat([page_digest(_bytes_of(plane[index, :, first : first + count]), each) for plane in self._planes])


def blocks(wanted: npt.NDArray[np.bool_]) -> list[tuple[int, int, int, int]]:
    """[rows, columns] as few blocks (first row, end, first column, end): a block for every run of equal rows and of columns in them."""
    found: list[tuple[int, int, int, int]] = []
    begin = 0
    for row in range(1, len(wanted) + 1):
        if row == len(wanted) or not np.array_equal(wanted[row], wanted[begin]):
            edges = np.flatnonzero(np.diff(wanted[begin], prepend=False, append=False))
            found += [(begin, row, int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]
            begin = row
    return found


def _bytes_of(pages: Tensor) -> Tensor:
    """[pages, ...] -> [pages, bytes]."""
    return pages.contiguous().view(len(pages), -1).view(torch.uint8)
