"""Fair queueing, by its theorem: what two waiting clients got never differs by more than an item of each."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.gateway.fair_queue import SPARE_ENTRIES, FairQueue

FLOWS = ("a", "b", "c")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
MAX_COST = 1000

flows = st.sampled_from(FLOWS)
costs = st.integers(1, MAX_COST)


class Model(RuleBasedStateMachine):
    """Any order of arrivals, turns and departures against a plain description of what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[tuple[str, int]] = FairQueue()
        #: In each flow (turn, number, what waits), the next one first.
        self.waiting: dict[str, list] = {flow: [] for flow in FLOWS}
        self.count = 0
        #: For each pair that has waited together without a break: what each got since.
        self.together: dict[tuple[str, str], dict[str, float]] = {}

    @rule(flow=flows, cost=costs, priority=st.sampled_from([0, 0, 0, -3, 2]))
    def arrive(self, flow: str, cost: int, priority: int) -> None:
        self.count += 1
        turn = float(self.count + priority)
        waiting = self.queue.push(flow, cost, WEIGHTS[flow], (flow, self.count), turn)
        insort(self.waiting[flow], (turn, self.count, waiting), key=lambda entry: entry[:2])

    @precondition(lambda self: len(self.queue))
    @rule()
    def serve(self) -> None:
        ahead = self.queue.peek()
        flow, number = self.queue.pop()
        assert ahead == (flow, number)
        served = self.waiting[flow].pop(0)[2]
        assert served.item == (flow, number), "within a flow: by turn, and first come, first served"
        for pair, got in self.together.items():
            if flow in pair:
                got[flow] += served.cost / WEIGHTS[flow]
                apart = abs(got[pair[0]] - got[pair[1]])
                assert apart <= sum(MAX_COST / WEIGHTS[one] for one in pair) + 1e-6

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        flow = data.draw(st.sampled_from([flow for flow in FLOWS if self.waiting[flow]]))
        place = data.draw(st.integers(0, len(self.waiting[flow]) - 1))
        gone = self.waiting[flow][place][2]
        del self.waiting[flow][place]
        assert self.queue.remove(gone)
        assert not self.queue.remove(gone)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.queue) == sum(map(len, self.waiting.values()))
        assert self.queue.num_remembered <= len(FLOWS)
        if not len(self.queue):
            assert self.queue.num_remembered == 0, "nothing is kept of flows that nobody competes with"

    @invariant()
    def pairs_that_wait_together(self) -> None:
        for pair in (("a", "b"), ("a", "c"), ("b", "c")):
            if not all(self.waiting[flow] for flow in pair):
                self.together.pop(pair, None)
            else:
                self.together.setdefault(pair, dict.fromkeys(pair, 0.0))


TestModel = Model.TestCase


def served(queue: FairQueue[str], num: int) -> list[str]:
    return [queue.pop() for _ in range(num)]


def fill(items: Iterable[tuple[str, int]]) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for flow, cost in items:
        queue.push(flow, cost, 1.0, flow)
    return queue


def test_many_small_prompts_are_not_held_up_by_few_large_ones() -> None:
    """By tokens, not by requests: while one prompt of 1,000 tokens is served, the other key gets its 1,000 in small ones."""
    queue = fill([("large", 1000)] * 3 + [("small", 100)] * 30)
    assert served(queue, 22) == ["large", *["small"] * 10, "large", *["small"] * 10]


def test_a_newcomer_is_served_before_a_flood() -> None:
    queue = fill([("flood", 100)] * 1000)
    served(queue, 500)
    queue.push("newcomer", 100, 1.0, "newcomer")
    assert "newcomer" in served(queue, 2)


def test_weights_are_shares() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(300):
        queue.push("heavy", 10, 3.0, "heavy")
        queue.push("light", 10, 1.0, "light")
    got: defaultdict[str, int] = defaultdict(int)
    for flow in served(queue, 200):
        got[flow] += 1
    assert abs(got["heavy"] - 150) <= 3


def test_leaving_and_coming_back_at_once_wins_nothing() -> None:
    """Whoever never keeps two requests in the queue would else always start from now."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        queue.push("patient", 100, 1.0, "patient")
    got: defaultdict[str, int] = defaultdict(int)
    queue.push("hopping", 300, 1.0, "hopping")
    for _ in range(16):
        flow = queue.pop()
        got[flow] += 1
        if flow == "hopping":
            queue.push("hopping", 300, 1.0, "hopping")
    assert 3 <= got["hopping"] <= 5


@given(st.lists(st.tuples(flows, costs, st.booleans()), max_size=30))
def test_who_leaves_before_anybody_is_served_might_never_have_come(items: list[tuple[str, int, bool]]) -> None:
    queue: FairQueue[int] = FairQueue()
    others: FairQueue[int] = FairQueue()
    placed = [queue.push(flow, cost, WEIGHTS[flow], number) for number, (flow, cost, _) in enumerate(items)]
    for number, (flow, cost, leaves) in enumerate(items):
        if leaves:
            queue.remove(placed[number])
        else:
            others.push(flow, cost, WEIGHTS[flow], number)
    assert len(queue) == len(others)
    assert [queue.pop() for _ in range(len(queue))] == [others.pop() for _ in range(len(others))]


def test_coming_and_going_leaves_nothing_behind() -> None:
    """A client that joins and leaves for ever, beside others that wait, must not fill the memory."""
    queue = fill([("patient", 1)] * 10)
    queue.push("patient", 1, 1.0, "patient")
    for _ in range(10_000):
        queue.remove(queue.push("restless", 5, 1.0, "restless"))
    assert len(queue._heap) <= 2 * len(queue._flows) + SPARE_ENTRIES
    queue.push("restless", 1000, 1.0, "restless")
    for _ in range(2):
        queue.pop()
    for _ in range(10_000):
        queue.remove(queue.push("restless", 5, 1.0, "restless"))
    assert len(queue._ahead_heap) <= 2 * len(queue._ahead) + SPARE_ENTRIES


def test_an_empty_queue_has_no_turn() -> None:
    with pytest.raises(IndexError):
        FairQueue().pop()


def test_what_left_from_the_middle_of_a_line_is_not_kept() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", 1, 1.0, "first")
    for number in range(100 * SPARE_ENTRIES):
        assert queue.remove(queue.push("a", 1, 1.0, "later", float(number)))
    assert len(queue._flows["a"].line) <= 2 + SPARE_ENTRIES + 1
    assert served(queue, 1) == ["first"]
