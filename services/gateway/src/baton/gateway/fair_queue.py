"""Who is next when several clients wait: start-time fair queueing over their prompts' tokens. Pure.

Each flow (a client) has a virtual time that grows by cost over weight with every item of its that is served; the flow that is least far is next.
Between two flows that both wait, what they got, divided by their weights, never differs by more than one item of each
(Goyal, Vin and Cheng, 1996). An item is charged when it is served: one that leaves before costs its flow nothing.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

#: Entries of heaps that may stand for nothing any more before they are cleaned out.
SPARE_ENTRIES = 64


@dataclass(eq=False, slots=True)
class Waiting(Generic[T]):
    """One item's place. cost: tokens."""

    flow: str
    cost: int
    weight: float
    item: T
    number: int
    #: It was served or has left.
    gone: bool = False


@dataclass(eq=False, slots=True)
class _Flow(Generic[T]):
    """start: virtual time at which its first item would be served. line: a heap of (turn, number, item), with items that have gone."""

    start: float
    line: list[tuple[float, int, Waiting[T]]] = field(default_factory=list)
    num_items: int = 0

    @property
    def head(self) -> Waiting[T]:
        while self.line[0][2].gone:
            heapq.heappop(self.line)
        return self.line[0][2]

    def add(self, turn: float, waiting: Waiting[T]) -> None:
        heapq.heappush(self.line, (turn, waiting.number, waiting))
        self.num_items += 1

    def take(self, waiting: Waiting[T]) -> None:
        waiting.gone = True
        self.num_items -= 1
        if len(self.line) > 2 * self.num_items + SPARE_ENTRIES:
            self.line = [entry for entry in self.line if not entry[2].gone]
            heapq.heapify(self.line)


class FairQueue(Generic[T]):
    """Within a flow the item with the least turn is first, and of equal ones the one that came first; between flows it is fair by weight. All
    operations take logarithmic time, spread over many."""

    def __init__(self) -> None:
        self._virtual = 0.0
        self._flows: dict[str, _Flow[T]] = {}
        #: Flows that left the queue ahead of the virtual time: they must not gain by coming back at once.
        self._ahead: dict[str, float] = {}
        self._ahead_heap: list[tuple[float, str]] = []
        self._heap: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    @property
    def num_remembered(self) -> int:
        """Flows of which something is kept."""
        return len(self._flows) + len(self._ahead)

    def push(self, flow: str, cost: int, weight: float, item: T, turn: float = 0.0) -> Waiting[T]:
        """weight: positive. turn: within its flow; any clock that all items share."""
        waiting = Waiting(flow, cost, weight, item, next(self._numbers))
        known = self._flows.get(flow)
        if known is None:
            known = self._flows[flow] = _Flow(max(self._virtual, self._ahead.pop(flow, 0.0)))
        known.add(turn, waiting)
        self._num_items += 1
        if known.head is waiting:
            self._line_up(flow, known)
        return waiting

    def peek(self) -> T:
        """The item whose turn it is. Raises IndexError when nothing waits."""
        return self._next()[1].head.item

    def pop(self) -> T:
        """The same, and it waits no more."""
        start, flow = self._next()
        name = heapq.heappop(self._heap)[2]
        waiting = flow.head
        flow.take(waiting)
        self._num_items -= 1
        self._virtual = start
        flow.start = start + waiting.cost / waiting.weight
        self._after_head(name, flow)
        return waiting.item

    def _next(self) -> tuple[float, _Flow[T]]:
        """The first entry of the heap that stands for an item: those before it, whose items have left, are taken out."""
        while True:
            start, number, name = self._heap[0]
            flow = self._flows.get(name)
            if flow is not None and flow.start == start and flow.head.number == number:
                return start, flow
            heapq.heappop(self._heap)

    def remove(self, waiting: Waiting[T]) -> bool:
        """It waits no more; False when its turn had come."""
        if waiting.gone:
            return False
        flow = self._flows[waiting.flow]
        was_head = flow.head is waiting
        flow.take(waiting)
        self._num_items -= 1
        if was_head:
            self._after_head(waiting.flow, flow)
        return True

    def _after_head(self, name: str, flow: _Flow[T]) -> None:
        if flow.num_items:
            self._line_up(name, flow)
            return
        del self._flows[name]
        if not self._flows:  # nobody is compared with anybody any more
            self._virtual = 0.0
            self._heap.clear()
            self._ahead.clear()
            self._ahead_heap.clear()
            return
        if flow.start > self._virtual:
            self._ahead[name] = flow.start
            heapq.heappush(self._ahead_heap, (flow.start, name))
            if len(self._ahead_heap) > 2 * len(self._ahead) + SPARE_ENTRIES:
                self._ahead_heap = [(start, other) for other, start in self._ahead.items()]
                heapq.heapify(self._ahead_heap)
        while self._ahead_heap and self._ahead_heap[0][0] <= self._virtual:
            start, overtaken = heapq.heappop(self._ahead_heap)
            if self._ahead.get(overtaken) == start:
                del self._ahead[overtaken]

    def _line_up(self, name: str, flow: _Flow[T]) -> None:
        heapq.heappush(self._heap, (flow.start, flow.head.number, name))
        if len(self._heap) > 2 * len(self._flows) + SPARE_ENTRIES:  # of items that left
            self._heap = [(known.start, known.head.number, other) for other, known in self._flows.items()]
            heapq.heapify(self._heap)
