"""The memory of all KV pages: one contiguous region, possibly someone else's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.errors import BufferTooSmallError
from baton.engine.layout import KVLayout
from baton.engine.short_of_memory import LESS_POOL, asked_for

#: A cache line, and the widest vector load.
ALIGNMENT = 64


def buffer_at(address: int, num_bytes: int) -> memoryview:
    """A writable view of foreign memory. The caller keeps that memory alive for as long as the view or a pool over it is used."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


@dataclass(frozen=True, slots=True)
class Writes:
    """Where a step's keys and values go.

    scattered: [n] int64, the slots of the first n rows, one by one (decode rows). runs: (first row, first slot, count) of all others.
    """

    scattered: Tensor
    runs: list[tuple[int, int, int]]


class KVPool:
    """layers[l] is [2, slots, kv heads, head dim]: keys, then values; slot = page * page_size + offset in the page.

    `buffer`: writable memory of at least `layout.pool_bytes`, 64-byte aligned, kept alive by this object but owned by the caller;
    None: the pool makes its own, on `device`, or raises InsufficientMemoryError. Bytes of pages that nobody wrote are undefined and never read.
    """

    def __init__(self, layout: KVLayout, dtype: torch.dtype, buffer: memoryview | None = None, device: torch.device | str = "cpu") -> None:
        if dtype.itemsize != layout.itemsize:
            raise ValueError(f"layout.itemsize = {layout.itemsize}, but {dtype} takes {dtype.itemsize} bytes")
        self.layout = layout
        num_elements = layout.pool_bytes // layout.itemsize
        with asked_for(f"the KV pool of {layout.num_pages} pages, {layout.pool_bytes} bytes,", device, LESS_POOL):
            flat = torch.empty(num_elements, dtype=dtype, device=device) if buffer is None else _foreign(buffer, layout, dtype)
        self.address = flat.data_ptr()
        num_slots = layout.num_pages * layout.page_size
        self.planes = flat.view(layout.num_layers, 2, num_slots, layout.num_kv_heads, layout.head_dim)
        self.layers: tuple[Tensor, ...] = self.planes.unbind(0)
        paged = self.planes.view(layout.num_layers, 2, layout.num_pages, layout.page_size, layout.num_kv_heads, layout.head_dim)
        self._pages = [(layer[0], layer[1]) for layer in paged.unbind(0)]

    @property
    def parts(self) -> tuple[KVPool, ...]:
        """The pools of a group's ranks, as of a ShardedPool: this one is whole."""
        return (self,)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, each [pages, page size, kv heads, head dim]."""
        return self._pages[layer]

    def copy_pages(self, pairs: Iterable[tuple[int, int]]) -> None:
        """(from, to): whole pages of all layers, in the order of the device's work."""
        size = self.layout.page_size
        for source, target in pairs:
            self.planes[:, :, target * size : (target + 1) * size].copy_(self.planes[:, :, source * size : (source + 1) * size])

    def write(self, layer: int, writes: Writes, keys_values: Tensor) -> None:
        """keys_values [rows, 2, kv heads, head dim], all rows of a step, into the slots that `writes` gives them."""
        planes, source = self.layers[layer], keys_values.transpose(0, 1)
        num_scattered = len(writes.scattered)
        if num_scattered:
            planes.index_copy_(1, writes.scattered, source[:, :num_scattered])
        for row, slot, count in writes.runs:
            planes[:, slot : slot + count].copy_(source[:, row : row + count])


def _foreign(buffer: memoryview, layout: KVLayout, dtype: torch.dtype) -> Tensor:
    if buffer.readonly:
        raise BufferTooSmallError("the buffer for the KV pool is read-only; it must be writable")
    if buffer.nbytes < layout.pool_bytes:
        raise BufferTooSmallError(f"the buffer for the KV pool has {buffer.nbytes} bytes; the layout takes {layout.pool_bytes}")
    raw = torch.frombuffer(buffer, dtype=torch.uint8)[: layout.pool_bytes]
    if raw.data_ptr() % ALIGNMENT:
        raise BufferTooSmallError(f"the buffer for the KV pool starts at {raw.data_ptr():#x}; it must be {ALIGNMENT}-byte aligned")
    return raw.view(dtype)
