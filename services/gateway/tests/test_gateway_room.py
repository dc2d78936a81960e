"""The state machine of a room, as a table and as properties."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.room import LOCAL_TABLE, PLAIN_TABLE, SPLIT_TABLE, Event, Room, State, Verdict
from baton.wire.v1 import common_pb2

FAILURE = common_pb2.Failure(cause="x")
GOOD = [event for event in Event if event is not Event.FAILED]
ORDER = {State.BOOTSTRAPPING: 0, State.WAITING: 1, State.TRANSFERRING: 2, State.SUCCESS: 3, State.FAILED: 4}

#: How far each event proves a split room to be.
PROVES = {
    Event.RESERVED: State.BOOTSTRAPPING,
    Event.BOOTSTRAPPED: State.WAITING,
    Event.PREFILL_STARTED: State.BOOTSTRAPPING,
    Event.TRANSFER_STARTED: State.TRANSFERRING,
    Event.TRANSFERRED: State.TRANSFERRING,
    Event.KV_READY: State.SUCCESS,
    Event.FIRST_TOKEN: State.BOOTSTRAPPING,
    Event.FINISHED: State.SUCCESS,
    Event.ANSWERED: State.SUCCESS,
}


def play(room: Room, events: list[Event]) -> list[Verdict]:
    return [room.fail(FAILURE, at) if event is Event.FAILED else room.apply(event, at) for at, event in enumerate(events, start=1)]


def test_the_tables_are_total_over_their_states() -> None:
    assert set(SPLIT_TABLE) == set(itertools.product(State, Event))
    assert set(LOCAL_TABLE) == set(itertools.product((State.BOOTSTRAPPING, State.WAITING, State.SUCCESS, State.FAILED), Event))
    assert set(PLAIN_TABLE) == set(itertools.product((State.WAITING, State.SUCCESS, State.FAILED), Event))


def test_the_numbers_are_the_wires() -> None:
    for state in State:
        assert common_pb2.RoomState.Name(state) == f"ROOM_STATE_{state.name}"  # type: ignore[arg-type]


def test_the_everyday_path() -> None:
    room = Room.split(0.0)
    path = [
        (Event.RESERVED, State.BOOTSTRAPPING),
        (Event.BOOTSTRAPPED, State.WAITING),
        (Event.PREFILL_STARTED, State.WAITING),
        (Event.TRANSFER_STARTED, State.TRANSFERRING),
        (Event.FIRST_TOKEN, State.TRANSFERRING),
        (Event.TRANSFERRED, State.TRANSFERRING),
        (Event.KV_READY, State.SUCCESS),
        (Event.FINISHED, State.SUCCESS),
    ]
    for at, (event, state) in enumerate(path, start=1):
        room.apply(event, at)
        assert room.state is state
    assert room.spans(10.0) == [
        (State.BOOTSTRAPPING, 0.0, 2),
        (State.WAITING, 2, 4),
        (State.TRANSFERRING, 4, 7),
        (State.SUCCESS, 7, 10.0),
    ]


def test_a_plain_room_waits_for_its_first_token() -> None:
    room = Room.plain(0.0)
    assert play(room, [Event.PREFILL_STARTED, Event.FIRST_TOKEN, Event.FINISHED]) == [Verdict.NOTED, Verdict.MOVED, Verdict.NOTED]
    assert room.spans(5.0) == [(State.WAITING, 0.0, 2), (State.SUCCESS, 2, 5.0)]


@given(st.lists(st.sampled_from(GOOD), max_size=30))
def test_only_what_was_proven_counts_not_the_order(events: list[Event]) -> None:
    """Twice, late, out of order: the state is the furthest that any event proves."""
    room = Room.split(0.0)
    play(room, events)
    assert room.state is max((PROVES[event] for event in events), key=ORDER.__getitem__, default=State.BOOTSTRAPPING)


def test_a_room_whose_prompt_decode_computes_moves_nothing() -> None:
    room = Room.local(0.0)
    verdicts = play(room, [Event.RESERVED, Event.PREFILL_STARTED, Event.FIRST_TOKEN, Event.FINISHED])
    assert verdicts == [Verdict.MOVED, Verdict.NOTED, Verdict.MOVED, Verdict.NOTED]
    assert room.spans(5.0) == [(State.BOOTSTRAPPING, 0.0, 1), (State.WAITING, 1, 3), (State.SUCCESS, 3, 5.0)]


@pytest.mark.parametrize("events", list(itertools.permutations([Event.RESERVED, Event.PREFILL_STARTED, Event.FIRST_TOKEN])))
def test_its_events_end_in_the_same_state_in_any_order(events: tuple[Event, ...]) -> None:
    room = Room.local(0.0)
    play(room, [*events[:-1]])
    assert room.state is (State.SUCCESS if Event.FIRST_TOKEN in events[:-1] else State.WAITING)
    play(room, [events[-1]])
    assert room.state is State.SUCCESS


MAKERS = st.sampled_from([Room.plain, Room.split, Room.local])


@given(st.lists(st.sampled_from(list(Event)), max_size=30), MAKERS)
def test_states_only_move_forward_and_end(events: list[Event], make: Callable[[float], Room]) -> None:
    room = make(0.0)
    seen = [room.state]
    for at, event in enumerate(events, start=1):
        before = room.state
        verdict = room.fail(FAILURE, at) if event is Event.FAILED else room.apply(event, at)
        assert (verdict is Verdict.MOVED) == (room.state is not before)
        assert ORDER[room.state] >= ORDER[before]
        if before in (State.SUCCESS, State.FAILED):
            assert room.state is before
        if before is State.FAILED:
            assert verdict is Verdict.TOO_LATE
        seen.append(room.state)
    assert room.failure is (FAILURE if room.state is State.FAILED else None)


@given(st.lists(st.sampled_from(GOOD), max_size=30))
def test_an_event_is_noted_once_and_then_repeated(events: list[Event]) -> None:
    room = Room.split(0.0)
    for number, verdict in enumerate(play(room, events)):
        assert (verdict is Verdict.REPEATED) == (events[number] in events[:number])


@given(st.lists(st.sampled_from(list(Event)), max_size=20), MAKERS)
def test_spans_are_contiguous_and_cover_the_room(events: list[Event], make: Callable[[float], Room]) -> None:
    room = make(0.0)
    play(room, events)
    spans = room.spans(100.0)
    assert spans[0][1] == 0.0
    assert spans[-1][2] == 100.0
    assert all(before[2] == after[1] for before, after in itertools.pairwise(spans))
    assert [ORDER[state] for state, _, _ in spans] == sorted(ORDER[state] for state, _, _ in spans)
    assert spans[-1][0] is room.state


def test_a_state_that_was_stepped_over_has_no_length() -> None:
    room = Room.split(0.0)
    room.apply(Event.KV_READY, 3.0)
    assert room.spans(5.0) == [
        (State.BOOTSTRAPPING, 0.0, 3.0),
        (State.WAITING, 3.0, 3.0),
        (State.TRANSFERRING, 3.0, 3.0),
        (State.SUCCESS, 3.0, 5.0),
    ]


@pytest.mark.parametrize("state", [State.BOOTSTRAPPING, State.WAITING, State.TRANSFERRING, State.SUCCESS])
def test_a_failure_ends_the_first_three_states_only(state: State) -> None:
    room = Room.split(0.0)
    to = {State.WAITING: Event.BOOTSTRAPPED, State.TRANSFERRING: Event.TRANSFER_STARTED, State.SUCCESS: Event.KV_READY}
    if state in to:
        room.apply(to[state], 1.0)
    room.fail(FAILURE, 2.0)
    assert room.state is (State.SUCCESS if state is State.SUCCESS else State.FAILED)
    assert (room.failure is None) == (state is State.SUCCESS)


def test_a_failure_goes_through_its_own_door() -> None:
    with pytest.raises(AssertionError):
        Room.split(0.0).apply(Event.FAILED, 1.0)
