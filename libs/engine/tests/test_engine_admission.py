"""The line in front of the pool: bounded overtaking, no head blocked for ever."""

from __future__ import annotations

from baton.engine.scheduling.admission import AdmissionQueue
from baton.engine.scheduling.sequence import Sequence
from baton.engine.types import Request, SamplingParams


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
