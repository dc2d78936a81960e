"""How KV pages move: every server has one link, whose bandwidth all that moves over it at a time shares evenly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton.bench.plan.clock import Clock
from baton.bench.plan.costs import PathCosts

Moved = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Move:
    """One chunk on its way. `moved`: told when the last byte is there and seen; None while the chunk is still being computed."""

    number: int
    source: int
    goal: int
    left_bytes: float
    tail_bytes: float
    since_s: float
    rate: float = 0.0
    version: int = 0
    arrived: bool = False
    computed_s: float = 0.0
    moved: Moved | None = None


class Links:
    """A chunk's bytes move while it is computed, layer by layer; what the last layer wrote moves after it, whatever has gone before.

    A move gets the lesser of its even shares of both ends' links; what it cannot use of one is not handed on to others."""

    def __init__(self, clock: Clock, path: PathCosts) -> None:
        self._clock, self._path = clock, path
        self._out: dict[int, dict[int, _Move]] = {}
        self._into: dict[int, dict[int, _Move]] = {}
        self._computing: dict[tuple[int, int], _Move] = {}
        self._next = 0

    def begin(self, source: int, goal: int, job: int, num_tokens: int) -> None:
        """A chunk of `job` starts to be computed; its pages begin to leave."""
        num_bytes = num_tokens * self._path.kv_bytes_per_token
        move = _Move(self._next, source, goal, num_bytes, num_bytes * self._path.tail_share, self._clock.now)
        self._next += 1
        self._computing[source, job] = move
        self._settle(move)
        self._out.setdefault(source, {})[move.number] = move
        self._into.setdefault(goal, {})[move.number] = move
        self._share(move)

    def computed(self, source: int, job: int, moved: Moved) -> None:
        """The chunk of `job` that began last is computed."""
        move = self._computing.pop((source, job))
        move.computed_s, move.moved = self._clock.now, moved
        if move.arrived:
            self._see(move)

    def _around(self, move: _Move) -> dict[int, _Move]:
        return {**self._out.get(move.source, {}), **self._into.get(move.goal, {})}

    def _settle(self, changed: _Move) -> None:
        now = self._clock.now
        for move in self._around(changed).values():
            move.left_bytes -= move.rate * (now - move.since_s)
            move.since_s = now

    def _share(self, changed: _Move) -> None:
        now, bandwidth = self._clock.now, self._path.bandwidth
        for move in self._around(changed).values():
            move.rate = bandwidth / max(len(self._out[move.source]), len(self._into[move.goal]))
            move.version += 1
            self._clock.at(now + max(0.0, move.left_bytes) / move.rate, partial(self._arrived, move, move.version))

    def _arrived(self, move: _Move, version: int) -> None:
        if move.version != version or move.arrived:
            return
        self._settle(move)
        move.arrived = True
        del self._out[move.source][move.number], self._into[move.goal][move.number]
        self._share(move)
        if move.moved is not None:
            self._see(move)

    def _see(self, move: _Move) -> None:
        assert move.moved is not None
        last_s = max(self._clock.now, move.computed_s + move.tail_bytes / self._path.bandwidth)
        self._clock.at(last_s + self._path.handoff_s, move.moved)
