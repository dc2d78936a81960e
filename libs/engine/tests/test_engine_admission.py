"""The line in front of the pool: bounded overtaking, no head blocked for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.scheduling.admission import AdmissionQueue
from baton.engine.scheduling.sequence import Sequence
from baton.engine.types import MAX_PRIORITY, PRIORITY_S, Request, SamplingParams


def waiting(*lengths: int, max_passes: int = 3) -> AdmissionQueue:
    queue = AdmissionQueue(max_passes)
    for room, length in enumerate(lengths, start=1):
        queue.push(Sequence(Request(room, [0] * length, SamplingParams()), [0] * length))
    return queue


def take_all(queue: AdmissionQueue, limit: int) -> list[int]:
    rooms = []
    while (sequence := queue.take(lambda each: each.num_prompt <= limit)) is not None:
        rooms.append(sequence.room)
    return rooms


def test_first_come_first_served():
    assert take_all(waiting(5, 5, 5), 5) == [1, 2, 3]


def test_smaller_requests_pass_a_blocked_head_within_the_bound():
    queue = waiting(9, 1, 1, 9, 1, 1, 1)
    assert take_all(queue, 5) == [2, 3, 5]
    assert len(queue) == 4
    assert queue.find(lambda each: each.num_prompt <= 5) is None
    assert take_all(queue, 9) == [1, 4, 6, 7]


def test_the_bound_starts_again_with_a_new_head():
    queue = waiting(9, 9, 1, 1, 1, 1, 1, max_passes=2)
    assert take_all(queue, 5) == [3, 4]
    queue.remove(1)
    queue.remove(1)
    assert take_all(queue, 5) == [5, 6]


def test_no_passing_at_all():
    assert take_all(waiting(9, 1, max_passes=0), 5) == []


def test_a_long_line_is_searched_so_far_only():
    queue = waiting(*[9] * 64, 1, max_passes=100)
    assert take_all(queue, 5) == []


def arriving(*arrivals: tuple[float, int]) -> AdmissionQueue:
    """Rooms 1, 2, ... that came at these times with these priorities."""
    queue = AdmissionQueue(3)
    for room, (arrived, priority) in enumerate(arrivals, start=1):
        queue.push(Sequence(Request(room, [0], SamplingParams(), arrived=arrived, priority=priority), [0]))
    return queue


def test_lower_priorities_first_and_equal_ones_as_they_came():
    assert take_all(arriving((0, 0), (1, 0), (2, -5), (3, 7), (4, -5)), 1) == [3, 5, 1, 2, 4]


def test_waiting_makes_up_for_priority():
    """A second for each unit: who is 5 behind in priority and 6 seconds ahead in time is first."""
    assert take_all(arriving((0, 5), (4, 0), (6, 0)), 1) == [2, 1, 3]


@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(-MAX_PRIORITY, MAX_PRIORITY)), min_size=1, max_size=40))
def test_nobody_is_passed_by_whoever_comes_much_later(arrivals):
    arrivals.sort(key=lambda arrival: arrival[0])
    order = take_all(arriving(*arrivals), 1)
    assert sorted(order) == list(range(1, len(arrivals) + 1))
    for place, room in enumerate(order):
        for later in order[place + 1 :]:
            assert arrivals[room - 1][0] <= arrivals[later - 1][0] + 2 * MAX_PRIORITY * PRIORITY_S


def test_a_new_head_has_all_its_passes():
    queue = arriving(*[(room, 0) for room in range(6)])
    blocked = {1}
    for _ in range(3):
        assert queue.take(lambda each: each.room not in blocked) is not None
    assert queue.find(lambda each: each.room not in blocked) is None
    queue.push(Sequence(Request(9, [0], SamplingParams(), arrived=9.0, priority=-50), [0]))
    assert queue.take(lambda each: each.room not in blocked).room == 9
