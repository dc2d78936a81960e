"""The states of a room, as a table. Pure: no clock, no network.

BOOTSTRAPPING -> WAITING -> TRANSFERRING -> SUCCESS, and FAILED from the first three; on one server there is less to go through. Reports come
from two servers over two streams, so an event may arrive twice, late, or before one that happened earlier. Each event proves how far the room
has come at least; the table only moves forward, so that every order of arrival ends in the same state.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.wire.v1 import common_pb2


class State(enum.IntEnum):
    """Numbers are the wire's RoomState."""

    BOOTSTRAPPING = common_pb2.ROOM_STATE_BOOTSTRAPPING
    WAITING = common_pb2.ROOM_STATE_WAITING
    TRANSFERRING = common_pb2.ROOM_STATE_TRANSFERRING
    SUCCESS = common_pb2.ROOM_STATE_SUCCESS
    FAILED = common_pb2.ROOM_STATE_FAILED


class Event(enum.Enum):
    RESERVED = "reserved"
    BOOTSTRAPPED = "bootstrapped"
    PREFILL_STARTED = "prefill_started"
    TRANSFER_STARTED = "transfer_started"
    TRANSFERRED = "transferred"
    KV_READY = "kv_ready"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    # The gateway has the whole answer (a stop string) and needs neither leg any more.
    ANSWERED = "answered"
    FAILED = "failed"


class Verdict(enum.Enum):
    """What an event did. REPEATED: this one came before. TOO_LATE: the room had failed."""

    MOVED = "moved"
    NOTED = "noted"
    REPEATED = "repeated"
    TOO_LATE = "too_late"


B, W, T, S, F = State.BOOTSTRAPPING, State.WAITING, State.TRANSFERRING, State.SUCCESS, State.FAILED

# Bootstrapped alone proves WAITING: prefill knows decode's pages only when decode has reserved and published them.
# A failure after SUCCESS ends the stream, not the room: the hand-over it speaks of was over.
# fmt: off
_COLUMNS = (
    Event.RESERVED, Event.BOOTSTRAPPED, Event.PREFILL_STARTED, Event.TRANSFER_STARTED, Event.TRANSFERRED,
    Event.KV_READY, Event.FIRST_TOKEN, Event.FINISHED, Event.ANSWERED, Event.FAILED,
)
_SPLIT_ROWS: dict[State, tuple[State, ...]] = {
    B: (B, W, B, T, T, S, B, S, S, F),
    W: (W, W, W, T, T, S, W, S, S, F),
    T: (T, T, T, T, T, S, T, S, S, F),
    S: (S, S, S, S, S, S, S, S, S, S),
    F: (F, F, F, F, F, F, F, F, F, F),
}
# One server does both halves: nothing to bootstrap, nothing to move. The first token ends WAITING.
_PLAIN_ROWS: dict[State, tuple[State, ...]] = {
    W: (W, W, W, W, W, W, S, S, S, F),
    S: (S, S, S, S, S, S, S, S, S, S),
    F: (F, F, F, F, F, F, F, F, F, F),
}
# fmt: on

# Decode computes the prompt itself: it has the pages (WAITING), then it computes, and the first token ends that. Nothing is moved, so there is no
# TRANSFERRING. That the prompt has begun proves that the pages are there.
# fmt: off
_LOCAL_ROWS: dict[State, tuple[State, ...]] = {
    B: (W, B, W, B, B, S, S, S, S, F),
    W: (W, W, W, W, W, S, S, S, S, F),
    S: (S, S, S, S, S, S, S, S, S, S),
    F: (F, F, F, F, F, F, F, F, F, F),
}
# fmt: on

Table = dict[tuple[State, Event], State]


def _table(rows: dict[State, tuple[State, ...]]) -> Table:
    return {(state, event): after for state, row in rows.items() for event, after in zip(_COLUMNS, row, strict=True)}


SPLIT_TABLE: Table = _table(_SPLIT_ROWS)
PLAIN_TABLE: Table = _table(_PLAIN_ROWS)
LOCAL_TABLE: Table = _table(_LOCAL_ROWS)


@dataclass(slots=True)
class Room:
    """One room's state and when each was entered. Times are whatever clock the caller uses, in seconds; they must not run backwards."""

    table: Table
    state: State
    entered: dict[State, float]
    milestones: dict[Event, float] = field(default_factory=dict)
    failure: common_pb2.Failure | None = None

    @classmethod
    def split(cls, at: float) -> Room:
        return cls(SPLIT_TABLE, State.BOOTSTRAPPING, {State.BOOTSTRAPPING: at})

    @classmethod
    def plain(cls, at: float) -> Room:
        return cls(PLAIN_TABLE, State.WAITING, {State.WAITING: at})

    @classmethod
    def local(cls, at: float) -> Room:
        return cls(LOCAL_TABLE, State.BOOTSTRAPPING, {State.BOOTSTRAPPING: at})

    def apply(self, event: Event, at: float) -> Verdict:
        """Takes an event other than FAILED. A state that was stepped over gets the same entry time as the one that was reached."""
        assert event is not Event.FAILED, "a failure has an author: use fail()"
        return self._step(event, at)

    def fail(self, failure: common_pb2.Failure, at: float) -> Verdict:
        """Takes a failure; it is kept if it is what ended the room."""
        verdict = self._step(Event.FAILED, at)
        if verdict is Verdict.MOVED:
            self.failure = failure
        return verdict

    def _step(self, event: Event, at: float) -> Verdict:
        if self.state is State.FAILED:
            return Verdict.TOO_LATE
        first = event not in self.milestones
        if first:
            self.milestones[event] = at
        after = self.table[self.state, event]
        if after is self.state:
            return Verdict.NOTED if first else Verdict.REPEATED
        passed = [after] if after is State.FAILED else [state for state in self._path() if self.state < state <= after]
        for state in passed:
            self.entered[state] = at
        self.state = after
        return Verdict.MOVED

    def _path(self) -> list[State]:
        return [state for state in (B, W, T, S) if (state, Event.FAILED) in self.table]

    def spans(self, end: float) -> list[tuple[State, float, float]]:
        """(state, entered, left) in order; the last one lasts until `end`."""
        steps = sorted(self.entered.items(), key=lambda item: (item[1], item[0]))
        lefts = [entered for _, entered in steps[1:]] + [end]
        return [(state, entered, max(entered, left)) for (state, entered), left in zip(steps, lefts, strict=True)]
