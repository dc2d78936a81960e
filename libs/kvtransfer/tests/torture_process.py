"""The senders and receivers of the torture test: small services over the library, with a session between each two. One process each.

    python torture_process.py receiver|sender FD TRANSPORT SEED PATH...

A receiver listens at PATH, a sender connects to every PATH. FD is a pipe to the conductor. Whatever breaks a rule ends the process with a traceback.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import sys
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from baton.kvtransfer import (
    STATUS_OK,
    AgentConfig,
    Closed,
    Doorbell,
    Lease,
    LeaseState,
    LeaseTable,
    PeerError,
    TransferError,
    WriteHandle,
    WriteState,
    digest,
    open_agent,
    spans_for,
)

PAGE = 2048
NUM_PAGES = 512
NUM_PLANES = 2  # one layer: keys and values
MAX_PAGES_OF_A_ROOM = 6
ROOMS_OF_A_SESSION = 24
QUIESCE_ALLOWED_S = 0.15


@dataclass(frozen=True)
class Layout:
    page_bytes: int = PAGE
    plane_bytes: int = PAGE * NUM_PAGES


LAYOUT = Layout()


def runs_of(pages: list[int]) -> list[tuple[int, int]]:
    return [(plane * LAYOUT.plane_bytes + page * PAGE, PAGE) for plane in range(NUM_PLANES) for page in pages]


class Bell:
    """Wakes the main loop from a callback's thread."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK)

    def ring(self, *_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"x")

    def answer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)


@dataclass
class Room:
    lease: Lease
    session: Session
    pages: list[int]
    slot: int
    abort_at: float
    revoked_at: float = 0.0
    release_at: float = 0.0
    digest: int = 0


@dataclass(eq=False)
class Session:
    connection: Connection
    instance: str
    identity: bytes
    inbox: Any
    is_lost: bool = False


class Receiver:
    def __init__(self, control: Connection, transport: str, seed: int, path: str) -> None:
        self.control = control
        self.random = random.Random(seed)
        self.agent = open_agent(AgentConfig(f"receiver-{uuid.uuid4()}", transport=transport, probe_bytes=0))
        self.region = self.agent.allocate(NUM_PLANES * NUM_PAGES * PAGE)
        self.view = np.frombuffer(self.region.buffer, dtype=np.uint8).reshape(NUM_PLANES, NUM_PAGES, PAGE)
        self.bell = Bell()
        self.agent.on_doorbell(self.bell.ring)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(path)
        self.server.listen()
        self.table = LeaseTable()
        self.rooms: dict[int, Room] = {}
        self.sessions: list[Session] = []
        self.free = list(range(NUM_PAGES))
        self.guard(self.free)
        self.count: Counter[str] = Counter()
        self.draining = False
        self.reported = 0.0

    # --- pages ---------------------------------------------------------------------------------

    def guard(self, pages: list[int]) -> None:
        for page in pages:
            self.view[:, page] = 0xC0 | page & 0x3F

    def take(self, count: int) -> list[int]:
        pages = [self.free.pop(self.random.randrange(len(self.free))) for _ in range(count)]
        self.check_guards(pages)
        return pages

    def check_guards(self, pages: list[int]) -> None:
        for page in pages:
            assert (self.view[:, page] == (0xC0 | page & 0x3F)).all(), f"free page {page} was written"

    def give_back(self, lease: Lease | None) -> None:
        if lease is None:
            return
        room = self.rooms.pop(lease.room)
        if room.digest:
            assert digest(self.region, runs_of(room.pages)) == room.digest, f"room {lease.room} was written after it landed"
        self.guard(room.pages)
        self.free += room.pages
        if not room.session.is_lost:
            room.session.inbox.disarm(room.slot)
        self.count["ended"] += 1

    # --- rooms ---------------------------------------------------------------------------------

    def open_rooms(self, session: Session) -> None:
        mine = sum(room.session is session for room in self.rooms.values())
        for _ in range(ROOMS_OF_A_SESSION - mine):
            count = self.random.randint(1, MAX_PAGES_OF_A_ROOM)
            if count > len(self.free):
                return
            number = self.random.getrandbits(63) | 1
            pages = self.take(count)
            lease = self.table.reserve(number, session.instance, count)
            slot = session.inbox.arm(number, lease.generation)
            patience = self.random.uniform(0, 0.01) if self.random.random() < 0.15 else self.random.uniform(0.2, 0.4)
            self.rooms[number] = Room(lease, session, pages, slot, time.monotonic() + patience)
            self.table.publish(number)
            message = ("publish", number, lease.generation, pages, slot)
            for _ in range(1 + (self.random.random() < 0.05)):
                self.say(session, message)

    def say(self, session: Session, message: tuple[Any, ...]) -> None:
        try:
            session.connection.send(message)
        except OSError:
            self.lose(session)

    def hear(self, session: Session) -> None:
        try:
            while session.connection.poll():
                word, number, generation = session.connection.recv()
                assert word == "quiesced"
                self.count["quiesced"] += 1
                self.give_back(self.table.quiesced(number, generation))
        except (EOFError, OSError):
            self.lose(session)

    def lose(self, session: Session) -> None:
        if not session.is_lost:
            session.is_lost = True
            session.connection.close()
            self.table.peer_lost(session.instance)
            self.count["sessions_lost"] += 1

    def look_at_doorbells(self, session: Session) -> None:
        for bell in session.inbox.poll():
            if bell.status != STATUS_OK:
                self.count["declined"] += 1
                self.give_back(self.table.quiesced(bell.room, bell.generation))
                continue
            room = self.rooms.get(bell.room)
            self.give_back(self.table.landed(bell.room, bell.generation))
            if room is not None and room.lease.state is LeaseState.LANDED:
                found = digest(self.region, runs_of(room.pages))
                assert found == bell.digest, f"room {bell.room}: the digest of the landed bytes is wrong"
                room.digest = found
                room.release_at = time.monotonic() + self.random.uniform(0, 0.02)
                self.table.admit(bell.room)
                self.count["delivered"] += 1

    def run_timers(self) -> None:
        now = time.monotonic()
        for room in list(self.rooms.values()):
            state, number = room.lease.state, room.lease.room
            if state is LeaseState.RUNNING and now > room.release_at:
                self.give_back(self.table.release(number))
            elif state is LeaseState.PUBLISHED and now > room.abort_at:
                self.table.abort(number)
                self.count["aborted"] += 1
                room.revoked_at = now
                for _ in range(1 + (self.random.random() < 0.1)):
                    self.say(room.session, ("revoke", number, room.lease.generation))
            elif state is LeaseState.ABORTING and now > room.revoked_at + QUIESCE_ALLOWED_S:
                self.table.overdue(number)
            elif state is LeaseState.QUARANTINED and now > room.revoked_at + 2 * QUIESCE_ALLOWED_S:
                self.lose(room.session)  # enough: only a fence helps now
        self.count["max_quarantined"] = max(self.count["max_quarantined"], self.table.num_pages(LeaseState.QUARANTINED))

    def fence_the_lost(self) -> None:
        for session in [session for session in self.sessions if session.is_lost]:
            self.look_at_doorbells(session)
            if session.inbox.fence(session.identity):
                self.look_at_doorbells(session)
                for lease in self.table.fenced(session.instance):
                    self.give_back(lease)
                self.count["fenced"] += 1
                self.count["forged"] += session.inbox.stats.num_stale
                self.count["invalid"] += session.inbox.stats.num_invalid
                self.count["by_backstop"] += session.inbox.stats.num_found_by_backstop
                session.inbox.close()
                self.sessions.remove(session)
            else:
                self.count["fence_refused"] += 1

    # --- the loop ------------------------------------------------------------------------------

    def welcome(self) -> None:
        end, _ = self.server.accept()
        connection = Connection(end.detach())
        try:
            instance, identity = connection.recv()
            inbox = self.agent.open_inbox(instance, self.region, 64)
            connection.send(inbox.invitation)
        except (EOFError, OSError):
            return
        self.sessions.append(Session(connection, instance, identity, inbox))

    def run(self) -> None:
        while not (self.draining and not self.rooms):
            live = {session.connection: session for session in self.sessions if not session.is_lost}
            for ready in wait([self.control, self.server, self.bell.reader, *live], 0.01):
                if ready is self.control:
                    self.draining = self.control.recv() == "drain"
                elif ready is self.server:
                    self.welcome()
                elif ready == self.bell.reader:
                    self.bell.answer()
                else:
                    self.hear(live[ready])
            for session in list(self.sessions):
                self.look_at_doorbells(session)
                if not session.is_lost and not self.draining:
                    self.open_rooms(session)
            self.run_timers()
            self.fence_the_lost()
            if time.monotonic() > self.reported + 0.05:
                self.report()
        for session in self.sessions:
            self.count["forged"] += session.inbox.stats.num_stale
            self.count["by_backstop"] += session.inbox.stats.num_found_by_backstop
        assert len(self.free) == NUM_PAGES
        assert len(self.table) == 0
        self.check_guards(self.free)
        self.report(final=True)

    def report(self, final: bool = False) -> None:
        self.reported = time.monotonic()
        self.control.send((final, dict(self.count)))


@dataclass(eq=False)
class Out:
    """A sender's session with one receiver."""

    path: str
    connection: Connection
    peer: Any
    handles: dict[int, WriteHandle] = field(default_factory=dict)
    revoked: dict[int, int] = field(default_factory=dict)  # room -> generation, waiting for its handle's end
    seen: set[int] = field(default_factory=set)


class Sender:
    def __init__(self, control: Connection, transport: str, seed: int, paths: list[str]) -> None:
        self.control = control
        self.random = random.Random(seed)
        self.agent = open_agent(AgentConfig(f"sender-{uuid.uuid4()}", transport=transport, connect_timeout_s=2.0, probe_bytes=0, max_put_bytes=4096))
        self.region = self.agent.allocate(NUM_PLANES * NUM_PAGES * PAGE)
        np.frombuffer(self.region.buffer, dtype=np.uint8)[:] = np.random.default_rng(seed).integers(
            0, 256, NUM_PLANES * NUM_PAGES * PAGE, dtype=np.uint8
        )
        self.bell = Bell()
        self.ended: deque[WriteHandle] = deque()
        self.agent.on_write(lambda handle: (self.ended.append(handle), self.bell.ring()))
        self.agent.on_peer_lost(self.bell.ring)
        self.paths = paths
        self.outs: dict[str, Out] = {}
        self.later: list[tuple[float, int, Any]] = []
        self.order = itertools.count()
        self.strays: dict[int, WriteHandle] = {}

    def connect(self, path: str) -> None:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(path)
            connection = Connection(end.detach())
            connection.send((self.agent_name, self.agent.identity))
            if not connection.poll(2):
                return
            peer = self.agent.connect(connection.recv(), self.region)
        except (OSError, EOFError, PeerError):
            return
        self.outs[path] = Out(path, connection, peer)

    @property
    def agent_name(self) -> str:
        return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"  # a session's own name: its leases are told apart from those of the session before

    def drop(self, out: Out) -> None:
        if self.outs.get(out.path) is out:
            del self.outs[out.path]
        out.peer.close()
        out.connection.close()

    def hear(self, out: Out) -> None:
        try:
            while out.connection.poll():
                word, *rest = out.connection.recv()
                if word == "publish":
                    self.published(out, *rest)
                else:
                    self.revoke(out, *rest)
        except (EOFError, OSError, PeerError, Closed):
            self.drop(out)

    def published(self, out: Out, number: int, generation: int, pages: list[int], slot: int) -> None:
        if number in out.seen:
            return
        out.seen.add(number)
        if self.random.random() < 0.05:
            self.quiesced(out, number, generation)  # declined at once
            return
        if self.random.random() < 0.05:  # a record of another generation, and one of another room, into the same doorbell
            for forged in (Doorbell(number, generation + 1), Doorbell(number ^ 2, generation)):
                stray = out.peer.begin(number ^ 4)
                stray.finish(slot, forged)
        handle = out.handles[number] = out.peer.begin(number)
        if self.random.random() < 0.03:
            handle.finish(slot, Doorbell(number, generation, status=7))  # declined through the doorbell
            return
        source = [self.random.randrange(NUM_PAGES) for _ in pages]
        cut = self.random.randint(0, len(pages))
        handle.post(spans_for(LAYOUT, LAYOUT, 0, source, pages, 0, cut))

        def rest() -> None:
            try:
                handle.post(spans_for(LAYOUT, LAYOUT, 0, source, pages, cut))
                handle.finish(slot, Doorbell(number, generation, len(pages), 5, STATUS_OK, digest(self.region, runs_of(source)), True))
            except Closed:
                pass  # revoked meanwhile

        if self.random.random() < 0.5:
            rest()
        else:
            self.later.append((time.monotonic() + self.random.uniform(0, 0.02), next(self.order), rest))

    def revoke(self, out: Out, number: int, generation: int) -> None:
        handle = out.handles.get(number)
        if handle is None or handle.state in (WriteState.DONE, WriteState.QUIESCED):
            self.quiesced(out, number, generation)
        else:
            out.revoked[number] = generation
            handle.cancel()

    def quiesced(self, out: Out, number: int, generation: int) -> None:
        for _ in range(1 + (self.random.random() < 0.1)):
            out.connection.send(("quiesced", number, generation))

    def settle(self) -> None:
        while self.ended:
            handle = self.ended.popleft()
            for out in list(self.outs.values()):
                if out.handles.get(handle.room) is handle:
                    generation = out.revoked.pop(handle.room, None)
                    if generation is not None and handle.state is not WriteState.FAILED:
                        self.quiesced(out, handle.room, generation)

    def run(self) -> None:
        while True:
            live = {out.connection: out for out in self.outs.values()}
            for ready in wait([self.control, self.bell.reader, *live], 0.01):
                if ready is self.control:
                    return
                if ready == self.bell.reader:
                    self.bell.answer()
                else:
                    self.hear(live[ready])
            now = time.monotonic()
            due, self.later = [entry for entry in self.later if entry[0] <= now], [entry for entry in self.later if entry[0] > now]
            for _, _, act in due:
                act()
            with contextlib.suppress(OSError):  # a dead session is found by `hear`
                self.settle()
            for path in self.paths:
                out = self.outs.get(path)
                if out is not None and out.peer.is_lost:
                    self.drop(out)
                elif out is None:
                    self.connect(path)


def main() -> None:
    role, descriptor, transport, seed, *paths = sys.argv[1:]
    control = Connection(int(descriptor))
    actor: Receiver | Sender = (
        Receiver(control, transport, int(seed), paths[0]) if role == "receiver" else Sender(control, transport, int(seed), paths)
    )
    try:
        actor.run()
    except (EOFError, TransferError):
        raise
    finally:
        actor.agent.close()


if __name__ == "__main__":
    main()
