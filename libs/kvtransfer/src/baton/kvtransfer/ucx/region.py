"""Registered memory of a UCX agent."""

from __future__ import annotations

import threading

from baton.kvtransfer import _native
from baton.kvtransfer.base import Region
from baton.kvtransfer.errors import Closed, InvalidArgument


class UcxRegion(Region):
    """Registered with the receiving context when made, and with a sending context when a peer first needs it."""

    def __init__(self, memory: _native.Memory, context: _native.Context) -> None:
        self._address = memory.address
        self._num_bytes = memory.num_bytes
        self._is_host = memory.is_host
        self._lock = threading.Lock()
        self._memories: dict[_native.Context, _native.Memory] = {context: memory}
        self._primary: _native.Memory | None = memory

    @property
    def address(self) -> int:
        return self._address

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def buffer(self) -> memoryview:
        if not self._is_host:
            raise InvalidArgument(f"the region at {self._address:#x} is device memory: it has no buffer")
        return memoryview(self.primary)

    @property
    def primary(self) -> _native.Memory:
        memory = self._primary
        if memory is None:
            raise Closed("the region is closed")
        return memory

    def memory_in(self, context: _native.Context) -> _native.Memory:
        """This memory as `context` knows it."""
        with self._lock:
            if self._primary is None:
                raise Closed("the region is closed")
            known = self._memories.get(context)
            if known is None:
                known = self._memories[context] = _native.Memory.adopt(context, self._address, self._num_bytes)
            return known

    def close(self) -> None:
        with self._lock:
            self._primary = None
            self._memories.clear()
