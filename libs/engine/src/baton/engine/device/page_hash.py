"""A digest of pages in device memory, computed where they are."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch

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
        self._num_planes = 2 * layout.num_layers
        self._num_pages = layout.num_pages
        self._bytes = pool.planes.view(-1).view(torch.uint8).view(self._num_planes * layout.num_pages, layout.page_bytes)
        self._device = self._bytes.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def of(self, extents: Iterable[Extent], first: int, count: int) -> int:
        """Pages [first, first + count) of the prompt, layer by layer, keys before values."""
        table = PageTable()
        for extent in extents:
            table.append(extent)
        pages = pages_from(table, first)[:count]
        if len(pages) != count:
            raise ValueError(f"pages [{first}, {first + count}) asked for, but the extents hold {table.num_pages} pages")
        if not pages:
            return 0
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            numbers = upload(pages, torch.int32, self._device)
            planes = torch.arange(self._num_planes, dtype=torch.int32, device=self._device) * self._num_pages
            digests = page_digest(self._bytes, (planes.unsqueeze(1) + numbers).view(-1))
            whole = page_digest(digests.view(torch.uint8).view(1, -1), torch.zeros(1, dtype=torch.int32, device=self._device))
            return int(whole.item()) & ((1 << 64) - 1)
