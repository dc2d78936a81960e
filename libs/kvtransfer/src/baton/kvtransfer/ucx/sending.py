"""The sending half of an agent for one kind of path: a context and its transfer queues."""

from __future__ import annotations

import threading

from baton.kvtransfer import _native
from baton.kvtransfer.config import AgentConfig


class SendingSide:
    """Queues are made when they are needed, up to `transfer_queues`; a peer stays on its queue."""

    def __init__(self, context: _native.Context, notices: _native.Notices, config: AgentConfig) -> None:
        self.context = context
        self._notices = notices
        self._config = config
        self._lock = threading.Lock()
        self._queues: list[_native.Queue] = []
        self._scratch: dict[int, _native.Memory] = {}

    def pick_queue(self) -> _native.Queue:
        """The one with the fewest peers."""
        with self._lock:
            idle = min(self._queues, key=lambda queue: queue.num_links, default=None)
            if idle is None or (idle.num_links > 0 and len(self._queues) < self._config.transfer_queues):
                idle = _native.Queue(self.context, self._notices, self._config.spin_us)
                self._queues.append(idle)
            return idle

    def probe_memory(self, num_bytes: int) -> _native.Memory:
        """Local memory for a probe, its pages touched: untouched ones read as one page of zeros, which flatters the path."""
        with self._lock:
            if num_bytes not in self._scratch:
                if self._config.device:
                    memory = _native.Memory.allocate_device(self.context, num_bytes)
                else:
                    memory = _native.Memory.allocate(self.context, num_bytes, shared=False)
                    memoryview(memory)[::4096] = bytes(-(-num_bytes // 4096))
                self._scratch[num_bytes] = memory
            return self._scratch[num_bytes]

    def stop(self) -> None:
        for queue in self._queues:
            queue.stop()
        self._scratch.clear()
