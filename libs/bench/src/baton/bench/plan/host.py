"""Where steps run: on a device of their own, or beside other servers of the same host that slow them."""

from collections.abc import Callable
from functools import partial

from baton.bench.plan.clock import Clock
from baton.bench.plan.costs import Neighbours


class Host:
    """Servers that share one machine. A busy neighbour slows a step from the moment at which it starts to that at which it ends."""

    def __init__(self, clock: Clock, neighbours: Neighbours) -> None:
        self._clock = clock
        self._neighbours = neighbours
        self._running: dict[int, _Running] = {}

    def run(self, server: int, work_s: float, *, has_chunk: bool, done: Callable[[], None]) -> None:
        """`done` is called when `work_s` of undisturbed work is done; a server has one step at a time."""
        self._settle()
        self._running[server] = _Running(work_s, has_chunk, done)
        self._reschedule()

    def _settle(self) -> None:
        now, num_others = self._clock.now, len(self._running) - 1
        for running in self._running.values():
            running.left_s -= (now - running.since_s) / self._neighbours.slowdown(num_others, has_chunk=running.has_chunk)
            running.since_s = now

    def _reschedule(self) -> None:
        num_others = len(self._running) - 1
        for server, running in self._running.items():
            running.since_s = self._clock.now
            running.version += 1
            ends_s = self._clock.now + max(0.0, running.left_s) * self._neighbours.slowdown(num_others, has_chunk=running.has_chunk)
            self._clock.at(ends_s, partial(self._ended, server, running, running.version))

    def _ended(self, server: int, running: "_Running", version: int) -> None:
        if running.version != version or self._running.get(server) is not running:
            return
        self._settle()
        del self._running[server]
        self._reschedule()
        running.done()


class _Running:
    __slots__ = ("done", "has_chunk", "left_s", "since_s", "version")

    def __init__(self, left_s: float, has_chunk: bool, done: Callable[[], None]) -> None:
        self.left_s, self.has_chunk, self.done = left_s, has_chunk, done
        self.since_s = 0.0
        self.version = 0
