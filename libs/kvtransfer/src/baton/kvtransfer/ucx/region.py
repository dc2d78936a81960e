"""Registered memory of a UCX agent."""

from __future__ import annotations

import threading
import weakref

from baton.kvtransfer import _native
from baton.kvtransfer.base import Region
from baton.kvtransfer.errors import Closed, InvalidArgument
from baton.kvtransfer.ucx.contexts import UcxContext


class UcxRegion(Region):
    """Registered with each context when something made from it first needs the memory. Forgotten contexts are let go of; who still uses the memory
    there holds it."""

    def __init__(self, memory: _native.Memory, context: UcxContext | None = None) -> None:
        """context: where `memory` is registered already."""
        self._address = memory.address
        self._num_bytes = memory.num_bytes
        self._is_host = memory.is_host
        self._lock = threading.Lock()
        self._primary: _native.Memory | None = memory
        self._memories: weakref.WeakKeyDictionary[UcxContext, _native.Memory] = weakref.WeakKeyDictionary()
        if context is not None:
            self._memories[context] = memory

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

    def memory_in(self, context: UcxContext) -> _native.Memory:
        """This memory as `context` knows it. Registering much memory takes long."""
        with self._lock:
            primary = self.primary
            known = self._memories.get(context)
            if known is None:
                known = self._memories[context] = _native.Memory.also_in(context.native, primary)
            return known

    def close(self) -> None:
        with self._lock:
            self._primary = None
            self._memories.clear()
