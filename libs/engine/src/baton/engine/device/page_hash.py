"""A digest of pages in device memory, computed where they are."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from baton.engine.device.seats import pages_from
from baton.engine.device.upload import upload
from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool
from baton.engine.types import Extent
from baton.kernels import page_digest


class DevicePageHash:
    """64 bits over a prompt's pages, on a stream of its own: it waits for that, not for the engine's steps.

    The pages must be complete: computed and read by the host's last step, or landed.
    """

    name = "mix64-pages"

    def __init__(self, pool: KVPool) -> None:
        layout = pool.layout
        self._planes = pool.planes.view(2 * layout.num_layers, layout.num_pages, layout.page_size, layout.num_kv_heads, -1)
        self._device = self._planes.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def of(self, extents: Iterable[Extent], first: int, count: int, heads: tuple[int, int] | None = None) -> int:
        """Pages [first, first + count) of the prompt, layer by layer, keys before values. heads: (first, count) of the pool's KV heads, of which
        alone the digest is; None: all."""
        table = PageTable()
        for extent in extents:
            table.append(extent)
        pages = pages_from(table, first)[:count]
        if len(pages) != count:
            raise ValueError(f"pages [{first}, {first + count}) asked for, but the extents hold {table.num_pages} pages")
        if not pages:
            return 0
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            digests = self._of_pages(pages) if heads is None else self._of_heads(pages, *heads)
            whole = page_digest(digests.view(torch.uint8).view(1, -1), torch.zeros(1, dtype=torch.int32, device=self._device))
            return int(whole.item()) & ((1 << 64) - 1)

    def _of_pages(self, pages: list[int]) -> Tensor:
        """[planes * pages] int64."""
        num_planes, num_pages = self._planes.shape[:2]
        numbers = upload(pages, torch.int32, self._device)
        planes = torch.arange(num_planes, dtype=torch.int32, device=self._device) * num_pages
        return page_digest(_bytes_of(self._planes.flatten(0, 1)), (planes.unsqueeze(1) + numbers).view(-1))

    def _of_heads(self, pages: list[int], first: int, count: int) -> Tensor:
        """The same of some heads: plane by plane they are copied out, so that a page's are side by side as they are in a pool that has no others."""
        index = upload(pages, torch.int64, self._device)
        each = torch.arange(len(pages), dtype=torch.int32, device=self._device)
        return torch.cat([page_digest(_bytes_of(plane[index, :, first : first + count]), each) for plane in self._planes])


def _bytes_of(pages: Tensor) -> Tensor:
    """[pages, ...] -> [pages, bytes]."""
    return pages.contiguous().view(len(pages), -1).view(torch.uint8)
