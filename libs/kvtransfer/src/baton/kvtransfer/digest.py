"""xxh3-64 over runs of a region: equal bytes in equal order give equal digests on both sides, however the pages are scattered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import xxhash

from baton.kvtransfer.errors import InvalidArgument


class _HasBuffer(Protocol):
    @property
    def buffer(self) -> memoryview: ...


def digest(region: _HasBuffer, runs: Iterable[tuple[int, int]]) -> int:
    """Of the bytes of `runs`, (offset, num_bytes) each, in order. Host memory only. The GIL is released while a run is hashed.

    Raises InvalidArgument for a run outside the region.
    """
    state = xxhash.xxh3_64()
    with region.buffer as buffer:
        for offset, num_bytes in runs:
            if offset < 0 or num_bytes < 0 or offset + num_bytes > buffer.nbytes:
                raise InvalidArgument(f"run ({offset}, {num_bytes}) is outside the region of {buffer.nbytes} bytes")
            state.update(buffer[offset : offset + num_bytes])
    return state.intdigest()
