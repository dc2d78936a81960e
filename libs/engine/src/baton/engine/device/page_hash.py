"""A digest of pages in device memory, computed where they are."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.device.seats import pages_from
from baton.engine.device.upload import upload_array
from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool
from baton.engine.types import Extent
from baton.kernels import page_digest, whole_digest

_threads = threading.local()

#: Which digests take by turns. torch hands out the same 32 of a GPU over and over, and the engine's is one of them: a digest that took one of torch's
#: each time would sooner or later stand behind the steps that are launched.
NUM_STREAMS = 16


class DevicePageHash:
    """64 bits over a prompt's pages, on streams of its own: they wait for those, not for the engine's steps."""

    name = "nh64-pages"

    def __init__(self, pool: KVPool) -> None:
        layout = pool.layout
        self._planes = pool.planes.view(2 * layout.num_layers, layout.num_pages, layout.page_size, layout.num_kv_heads, -1)
        device = self._planes.device
        of_gpu = [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)] if device.type == "cuda" else []  # type: ignore[no-untyped-call]
        self._streams: Iterator[torch.cuda.Stream | None] = cycle(of_gpu or [None])

    def of(self, extents: Iterable[Extent], first: int, count: int, heads: tuple[int, int] | None = None) -> int:
        """Pages [first, first + count) of the prompt, layer by layer, keys before values. heads: (first, count) of the pool's KV heads, of which
        alone the digest is; None: all. The pages must be complete: computed and read by the host's last step, or landed."""
        return self.open(extents, first, count, heads).value()

    @torch.inference_mode()
    def open(self, extents: Iterable[Extent], first: int, count: int, heads: tuple[int, int] | None = None) -> DevicePagesDigest:
        """The same, of pages that are not complete yet. Raises ValueError where the extents hold fewer."""
        table = PageTable()
        for extent in extents:
            table.append(extent)
        pages = pages_from(table, first)[:count]
        if len(pages) != count:
            raise ValueError(f"pages [{first}, {first + count}) asked for, but the extents hold {table.num_pages} pages")
        planes = self._planes if heads is None else self._planes[..., heads[0] : sum(heads), :]
        return DevicePagesDigest(planes.flatten(3).view(torch.uint8), np.asarray(pages, dtype=np.int32), next(self._streams))


class DevicePagesDigest:
    """The digest of some pages that are being computed: what is known to be complete is read `ahead`, the rest with `value`. One thread at a time.

    planes: [2 * layers, pages of the pool, page size, bytes of a token] uint8. pages: numbers in the pool, in the prompt's order. stream: of the GPU,
    not the engine's; None on a CPU. Each operation of torch may wait for Python's lock, which the engine's thread holds most of the time: `prepare`
    does what can be done before the pages are there.
    """

    def __init__(self, planes: Tensor, pages: npt.NDArray[np.int32], stream: torch.cuda.Stream | None) -> None:
        self._planes, self._pages, self._stream = planes, pages, stream
        self._answered: torch.cuda.Event | None = None if stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._buffers: _Buffers | None = None
        self._is_known = np.zeros((len(planes), len(pages)), dtype=bool)
        #: The sum of all pages' terms is in the host's memory, or on its way there with nothing else to be read.
        self._is_asked = False

    @torch.inference_mode()
    def prepare(self) -> None:
        """What `ahead` and `value` would do first: memory, the pages' numbers on the device, the kernel compiled."""
        if len(self._pages) and self._buffers is None:
            with self._streaming():
                self._make_buffers()

    @torch.inference_mode()
    def ahead(self, layers: range, first: int, count: int, ready: object) -> None:
        """Pages [first, first + count) of these, in consecutive layers: complete when `ready`, a torch.cuda.Event, has fired; None: now. Nothing
        waits for it here. Pages that come again (one that was filled in part) count as they are then."""
        if not count or not layers:
            return
        with self._streaming():
            if self._stream is not None and isinstance(ready, torch.cuda.Event):
                self._stream.wait_event(ready)
            self._read(2 * layers.start, 2 * layers.stop, first, first + count)
            self._ask_once_known()

    def is_ready(self) -> bool:
        """Whether `value` would not wait."""
        return not len(self._pages) or (self._is_asked and (self._answered is None or self._answered.query()))  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def value(self) -> int:
        """Waits for the device."""
        if not len(self._pages):
            return 0
        if not self._is_asked:
            with self._streaming():
                for block in blocks(~self._is_known):
                    self._read(*block)
                self._ask_once_known()
        assert self._buffers is not None
        if self._answered is not None:
            self._answered.synchronize()
        return whole_digest(int(self._buffers.answer), self._is_known.size)

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        """What is launched and allocated within is on our stream."""
        if self._stream is None:
            yield
            return
        _enter(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def _make_buffers(self) -> _Buffers:
        device = self._planes.device
        state = torch.zeros(1 + self._is_known.size, dtype=torch.int64, device=device)
        answer = torch.empty((), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._buffers = _Buffers(upload_array(self._pages, device), state, state[0], answer)
        page_digest(self._planes, self._buffers.numbers, state, range(0), range(0))
        return self._buffers

    def _read(self, begin: int, end: int, first: int, last: int) -> None:
        """Adds pages [first, last) of planes [begin, end)."""
        buffers = self._buffers or self._make_buffers()
        page_digest(self._planes, buffers.numbers, buffers.state, range(begin, end), range(first, last))
        self._is_known[begin:end, first:last] = True
        self._is_asked = False

    def _ask_once_known(self) -> None:
        """Behind the last page that is read: the copy to the host, so that nobody need ask for it when the pages are complete."""
        if self._buffers is None or not self._is_known.all():
            return
        self._buffers.answer.copy_(self._buffers.total, non_blocking=True)
        if self._answered is not None:
            self._answered.record(self._stream)
        self._is_asked = True


def _enter(stream: torch.cuda.Stream) -> None:
    """Makes the stream's GPU this thread's, for good: to go back to one that this process has no other use for would cost its memory there."""
    if torch.cuda.current_device() != stream.device_index:
        torch.cuda.set_device(stream.device_index)
    if not getattr(_threads, "has_context", False):
        # Any call of CUDA's runtime gives a new thread its context. A kernel's launch is the driver's, and finds none.
        stream.query()
        _threads.has_context = True


class _Buffers(NamedTuple):
    """numbers: of the pages. state: of the kernel; total: its first number. answer: that in pinned host memory.

    All are of the digest's stream, in whose order their memory is used again: they may be dropped while it reads.
    """

    numbers: Tensor
    state: Tensor
    total: Tensor
    answer: Tensor


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
