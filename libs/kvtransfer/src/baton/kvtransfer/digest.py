"""xxh3-64 over runs of a region: equal bytes in equal order give equal digests on both sides, however the pages are scattered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import xxhash

from baton.kvtransfer.errors import InvalidArgument


class _HasBuffer(Protocol):
    @property
    def buffer(self) -> memoryview: ...


def digest(region: _HasBuffer, runs: Iterable[tuple[int, int]], columns: tuple[int, int, int] | None = None) -> int:
    """Of the bytes of `runs`, (offset, num_bytes) each, in order. Host memory only. The GIL is released while a run is hashed.

    columns: (row_bytes, start, stop): runs are tables of such rows, and of each row only bytes [start, stop) count, as if they lay side by side.
    Raises InvalidArgument for a run outside the region, or one that is not a number of whole rows.
    """
    state = xxhash.xxh3_64()
    with region.buffer as buffer:
        for offset, num_bytes in runs:
            if offset < 0 or num_bytes < 0 or offset + num_bytes > buffer.nbytes:
                raise InvalidArgument(f"run ({offset}, {num_bytes}) is outside the region of {buffer.nbytes} bytes")
            run = buffer[offset : offset + num_bytes]
            state.update(run if columns is None else _cut(run, *columns))
    return state.intdigest()


def _cut(run: memoryview, row_bytes: int, start: int, stop: int) -> memoryview:
    """A copy: a view into the region must not outlive this call."""
    if not 0 <= start < stop <= row_bytes or run.nbytes % row_bytes:
        raise InvalidArgument(f"columns [{start}, {stop}) of rows of {row_bytes} bytes do not fit a run of {run.nbytes}")
    table = np.frombuffer(run, dtype=np.uint8).reshape(-1, row_bytes)
    return np.ascontiguousarray(table[:, start:stop]).reshape(-1).data
