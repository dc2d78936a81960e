"""What a worker said and its rooms were not told yet: order within a room, who goes first between rooms."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_harness import ask, eventually, failure_of, greedy, start_stack
from gateway_worker import silence
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.backlog import Backlog, Run
from baton.gateway.tokens import TokenMerge
from baton.wire.v1 import common_pb2, worker_pb2

ROOMS = st.integers(1, 4)


def step(*tokens: tuple[int, int], events: tuple[int, ...] = ()) -> worker_pb2.Report:
    """tokens: (room, index). Token number i of room r is 1000 r + i."""
    report = worker_pb2.Report(events=[worker_pb2.RoomEvent(room=room) for room in events])
    for room, index in tokens:
        report.rooms.append(room)
        report.indexes.append(index)
        report.tokens.append(1000 * room + index)
    return report


def told(room: int, words: Any) -> list[Any]:
    """Tokens as they were reported, events as "event"."""
    out: list[Any] = []
    for word in words:
        out += [(room, word.first + place) for place, _ in enumerate(word.tokens)] if isinstance(word, Run) else ["event"]
        if isinstance(word, Run):
            assert word.tokens == [1000 * room + word.first + place for place, _ in enumerate(word.tokens)]
    return out


def everything(backlog: Backlog) -> list[tuple[int, list[Any]]]:
    out = []
    while len(backlog):
        room, words = backlog.take()
        out.append((room, told(room, words)))
    return out


@given(st.lists(st.tuples(st.lists(st.tuples(ROOMS, st.integers(0, 3))), st.lists(ROOMS), st.integers(0, 3)), max_size=8))
def test_each_room_hears_everything_in_order_however_little_is_taken_at_a_time(steps: list[Any]) -> None:
    backlog = Backlog()
    heard: dict[int, list[Any]] = {}
    wanted: dict[int, list[Any]] = {}

    def take() -> None:
        room, words = backlog.take()
        heard.setdefault(room, []).extend(told(room, words))

    for tokens, events, num_taken in steps:
        backlog.add(step(*tokens, events=tuple(events)))
        for room, index in tokens:
            wanted.setdefault(room, []).append((room, index))
        for room in events:
            wanted.setdefault(room, []).append("event")
        for _ in range(min(num_taken, len(backlog))):
            take()
    while len(backlog):
        take()
    assert heard == wanted
    assert backlog.num_tokens == 0
    with pytest.raises(KeyError):
        backlog.take()


def test_first_tokens_and_events_go_before_a_steps_other_tokens() -> None:
    backlog = Backlog()
    backlog.add(step((1, 5), (2, 7), (3, 9)))
    backlog.add(step((4, 0), events=(5,)))
    assert backlog.num_first == 2
    assert everything(backlog) == [(4, [(4, 0)]), (5, ["event"]), (1, [(1, 5)]), (2, [(2, 7)]), (3, [(3, 9)])]


def test_nothing_overtakes_what_was_said_of_the_same_room_before() -> None:
    backlog = Backlog()
    backlog.add(step((1, 5), (2, 7)))
    backlog.add(step((2, 8), events=(2,)))
    assert everything(backlog) == [(1, [(1, 5)]), (2, [(2, 7), (2, 8), "event"])]


def test_tokens_of_several_steps_for_a_room_that_waits_are_one_run() -> None:
    backlog = Backlog()
    for index in range(5, 8):
        backlog.add(step((1, index)))
    assert backlog.num_tokens == 3
    _, words = backlog.take()
    assert words == [Run(5, [1005, 1006, 1007])]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=20))
def test_a_run_at_once_is_what_its_tokens_are_one_by_one(runs: list[tuple[int, int]]) -> None:
    whole, single = TokenMerge(10), TokenMerge(10)
    for first, length in runs:
        tokens = list(range(first, min(first + length, 10)))
        if not tokens:
            continue
        if not whole.extend(first, tokens):
            for index in tokens:
                whole.add(index, index)
        for index in tokens:
            single.add(index, index)
        assert whole.tokens == single.tokens
        assert (whole.num_early, whole.num_repeated) == (single.num_early, single.num_repeated)


def test_a_run_past_the_end_of_the_answer_is_not_taken_as_a_whole() -> None:
    assert not TokenMerge(2).extend(0, [1, 2, 3])


async def test_what_a_worker_said_before_it_was_lost_reaches_the_client(model_folder: Any) -> None:
    async with start_stack(model_folder, plain=1) as stack:
        stack.workers[0].script = silence
        call = stack.call(ask(sampling=greedy(max_tokens=400, ignore_eos=True)))
        await call.read()
        room = (await stack.workers[0].next_start()).room
        await eventually(lambda: stack.gateway.fleet.workers[0].num_rooms == 1)
        one = stack.gateway.fleet.workers[0]
        one.take(worker_pb2.Report(rooms=[room] * 3, indexes=[0, 1, 2], tokens=[3, 4, 5]))
        one.went("as the test says")
        ids = []
        while not ids or len(ids) < 3:
            ids += (await call.read()).token_ids
        assert ids == [3, 4, 5]
        code, failure = await failure_of(call)
        assert failure.cause == "plain_lost"
        assert failure.origin == common_pb2.ORIGIN_DECODE
        assert code.name == "UNAVAILABLE"
