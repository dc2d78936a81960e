"""Ordinary memory of this process."""

from __future__ import annotations

import ctypes

from baton.kvtransfer.base import Region
from baton.kvtransfer.errors import Closed


class LoopbackRegion(Region):
    def __init__(self, memory: bytearray | ctypes.Array[ctypes.c_char]) -> None:
        view = memoryview(memory).cast("B")
        self._num_bytes = view.nbytes
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._view: memoryview | None = view

    @property
    def address(self) -> int:
        return self._address

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def buffer(self) -> memoryview:
        if self._view is None:
            raise Closed("the region is closed")
        return self._view[:]

    def close(self) -> None:
        self._view = None
