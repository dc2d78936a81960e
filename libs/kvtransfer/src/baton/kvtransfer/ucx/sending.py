"""The sending half of an agent for one kind of path: its transfer queues."""

from __future__ import annotations

import threading

from baton.kvtransfer import _native
from baton.kvtransfer.config import AgentConfig
from baton.kvtransfer.ucx.contexts import UcxContext
from baton.kvtransfer.ucx.region import UcxRegion


class SendingSide:
    """Queues are made when they are needed, up to `transfer_queues`; a peer stays on its queue."""

    def __init__(self, context: UcxContext | None, device: int, notices: _native.Notices, config: AgentConfig) -> None:
        """context: of peers on this host, which share a worker in each queue. None: peers over networks, each with its own."""
        self._context = context
        self._device = device
        self._notices = notices
        self._config = config
        self._lock = threading.Lock()
        self._queues: list[_native.Queue] = []
        self._scratch: dict[int, UcxRegion] = {}

    @property
    def has_device(self) -> bool:
        """Whether the queues can wait for CUDA events."""
        return self._device >= 0

    def pick_queue(self) -> _native.Queue:
        """The one with the fewest peers. Raises UCXError."""
        with self._lock:
            idle = min(self._queues, key=lambda queue: queue.num_links, default=None)
            if idle is None or (idle.num_links > 0 and len(self._queues) < self._config.transfer_queues):
                context = None if self._context is None else self._context.native
                idle = _native.Queue(context, self._device, self._notices, self._config.spin_us)
                self._queues.append(idle)
            return idle

    def probe_memory(self, num_bytes: int, context: UcxContext) -> _native.Memory:
        """Local memory for a probe, its pages touched: untouched ones read as one page of zeros, which flatters the path."""
        with self._lock:
            if num_bytes not in self._scratch:
                if self._config.device:
                    memory = _native.Memory.allocate_device(self._device, num_bytes)
                else:
                    memory = _native.Memory.allocate_private(num_bytes)
                    memoryview(memory)[::4096] = bytes(-(-num_bytes // 4096))
                self._scratch[num_bytes] = UcxRegion(memory)
            return self._scratch[num_bytes].memory_in(context)

    def stop(self) -> None:
        for queue in self._queues:
            queue.stop()
        self._scratch.clear()
