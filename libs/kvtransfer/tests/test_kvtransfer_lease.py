"""The lease: no order of events frees a page that may still be written."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.kvtransfer import InvalidArgument, Lease, LeaseEvent, LeaseState, LeaseTable
from baton.kvtransfer.lease import TRANSITIONS, WRITABLE, after

PROOFS = {LeaseEvent.LANDED, LeaseEvent.QUIESCED, LeaseEvent.FENCED}


def test_only_a_proof_frees_what_was_published() -> None:
    freeing = {(state, event) for (state, event), then in TRANSITIONS.items() if then is LeaseState.FREE and state in WRITABLE}
    assert {event for _, event in freeing} == PROOFS
    for state in WRITABLE:
        assert after(state, LeaseEvent.RELEASE) is None
        for event in set(LeaseEvent) - PROOFS:
            assert after(state, event) in {None, *WRITABLE}


def test_every_state_is_reached_and_left() -> None:
    assert set(TRANSITIONS.values()) | {LeaseState.RESERVED} == set(LeaseState)
    assert {state for state, _ in TRANSITIONS} == set(LeaseState) - {LeaseState.FREE}


def test_a_room_serves_once() -> None:
    table = LeaseTable(num_tombstones=2)
    table.reserve(1, "p", 4)
    with pytest.raises(InvalidArgument, match="room=1 was used before"):
        table.reserve(1, "p", 4)
    assert table.release(1) == Lease(1, 1, "p", 4, LeaseState.FREE)
    with pytest.raises(InvalidArgument, match="room=1"):
        table.reserve(1, "p", 4)
    with pytest.raises(InvalidArgument, match="room=0"):
        table.reserve(0, "p", 4)
    for room in (2, 3):
        table.release(table.reserve(room, "p", 1).room)
    table.reserve(1, "p", 1)  # its tombstone made way: the memory is bounded
    assert table.get(1) is not None
    assert len(table) == 1


def test_generations_differ_and_never_are_zero() -> None:
    table = LeaseTable(first_generation=2**32 - 1)
    assert [table.reserve(room, "p", 1).generation for room in (1, 2, 3)] == [2**32 - 1, 1, 2]


def test_stale_late_and_unknown_events_are_counted_and_change_nothing() -> None:
    table = LeaseTable()
    lease = table.reserve(7, "p", 1)
    table.publish(7)
    assert table.landed(7, lease.generation + 1) is None
    assert table.quiesced(7, lease.generation + 1) is None
    assert table.landed(8, 1) is None
    assert lease.state is LeaseState.PUBLISHED
    table.landed(7, lease.generation)
    table.landed(7, lease.generation)
    assert table.quiesced(7, lease.generation) is None
    table.admit(7)
    assert table.release(7) is lease
    assert table.landed(7, lease.generation) is None
    assert table.ignored == {"generation/stale": 2, "room/unknown": 1, "landed/landed": 1, "landed/quiesced": 1, "room/ended": 1}
    with pytest.raises(InvalidArgument, match="room=7 is unknown"):
        table.publish(7)


def test_quarantine_is_counted_by_pages() -> None:
    table = LeaseTable()
    for room, peer in ((1, "p"), (2, "p"), (3, "q"), (4, "p")):
        table.reserve(room, peer, 10 * room)
        if room != 4:
            table.publish(room)
    table.abort(1)
    assert [lease.room for lease in table.peer_lost("p")] == [1, 2]
    assert table.num_pages(LeaseState.QUARANTINED) == 30
    assert table.num_pages(LeaseState.RESERVED) == 40
    assert [lease.room for lease in table.fenced("p")] == [1, 2]
    assert table.num_pages(LeaseState.QUARANTINED) == 0
    assert table.get(3) is not None


@dataclass
class Writer:
    """What the sender of one room really does. It writes until it has stopped; then it says so, once or more, or never."""

    generation: int
    peer: str
    stopped: bool = False
    rang: bool = False
    mail: list[str] = field(default_factory=list)


class LeaseStorm(RuleBasedStateMachine):
    """A receiver's table against senders that finish, decline, are killed, suspended, slow; whose words come late, twice or forged."""

    @initialize()
    def begin(self) -> None:
        self.table = LeaseTable(num_tombstones=4)
        self.writers: dict[int, Writer] = {}
        self.gone: set[str] = set()
        self.free = 100
        self.next_room = 1

    def freed(self, lease: Lease | None) -> None:
        if lease is not None:
            writer = self.writers.get(lease.room)
            assert writer is None or writer.stopped, f"room {lease.room} was freed while its sender may write"
            self.free += lease.num_pages

    def rooms(self) -> st.SearchStrategy[int]:
        return st.integers(1, max(self.next_room, 1))

    @rule(peer=st.sampled_from("pqr"), pages=st.integers(1, 9))
    def reserve(self, peer: str, pages: int) -> None:
        if pages <= self.free:
            self.table.reserve(self.next_room, peer, pages)
            self.free -= pages
            self.next_room += 1

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        room = data.draw(self.rooms())
        lease = self.table.get(room)
        if lease is None or lease.state is not LeaseState.RESERVED:
            with pytest.raises(InvalidArgument):
                self.table.publish(room)
            return
        self.table.publish(room)
        self.writers[room] = Writer(lease.generation, lease.peer, stopped=lease.peer in self.gone)

    @rule(data=st.data(), word=st.sampled_from(["landed", "quiesced"]))
    def sender_stops_and_says_so(self, data: st.DataObject, word: str) -> None:
        writer = self.writers.get(data.draw(self.rooms()))
        if writer is not None and not writer.stopped:
            writer.stopped = True
            writer.mail.append(word)

    @rule(data=st.data(), twice=st.booleans())
    def mail_arrives(self, data: st.DataObject, twice: bool) -> None:
        room = data.draw(self.rooms())
        writer = self.writers.get(room)
        for word in writer.mail * (1 + twice) if writer else []:
            assert writer is not None
            self.freed(self.table.landed(room, writer.generation) if word == "landed" else self.table.quiesced(room, writer.generation))

    @rule(data=st.data(), offset=st.integers(1, 5), word=st.sampled_from(["landed", "quiesced"]))
    def forged_generation(self, data: st.DataObject, offset: int, word: str) -> None:
        room = data.draw(self.rooms())
        lease = self.table.get(room)
        generation = (lease.generation if lease else 0) + offset
        assert (self.table.landed if word == "landed" else self.table.quiesced)(room, generation) is None

    @rule(data=st.data(), act=st.sampled_from(["abort", "overdue", "admit", "release"]))
    def receiver_acts(self, data: st.DataObject, act: str) -> None:
        self.freed(getattr(self.table, act)(data.draw(self.rooms())))

    @rule(peer=st.sampled_from("pqr"))
    def session_breaks(self, peer: str) -> None:
        self.table.peer_lost(peer)

    @rule(peer=st.sampled_from("pqr"))
    def sender_dies(self, peer: str) -> None:
        self.gone.add(peer)
        for writer in self.writers.values():
            writer.stopped = writer.stopped or writer.peer == peer

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def fence_is_proven(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.gone)))
        for lease in self.table.fenced(peer):
            self.freed(lease)

    @invariant()
    def pages_add_up(self) -> None:
        assert self.free + sum(self.table.num_pages(state) for state in LeaseState) == 100

    @invariant()
    def whoever_may_write_has_a_lease(self) -> None:
        for room, writer in self.writers.items():
            if not writer.stopped:
                lease = self.table.get(room)
                assert lease is not None
                assert lease.state in WRITABLE

    def teardown(self) -> None:
        for peer in "pqr":
            self.sender_dies(peer)
            self.table.peer_lost(peer)
            for lease in self.table.fenced(peer):
                self.freed(lease)
        for room in range(1, self.next_room):
            self.freed(self.table.release(room))
            self.freed(self.table.abort(room))
        assert self.free == 100


TestLeaseStorm = LeaseStorm.TestCase
TestLeaseStorm.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
