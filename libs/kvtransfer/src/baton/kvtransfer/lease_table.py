"""All leases of one receiver: rooms, generations, page counts. Pure; not thread safe; owned by whoever owns the pages."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from baton.kvtransfer.errors import InvalidArgument
from baton.kvtransfer.lease import LeaseEvent, LeaseState, after

_MAX_GENERATION = 2**32 - 1


@dataclass(slots=True)
class Lease:
    """One room's hold on pages. `peer`: the writer's instance id. `generation`: never 0, never reused by the table."""

    room: int
    generation: int
    peer: str
    num_pages: int
    state: LeaseState = LeaseState.RESERVED


class LeaseTable:
    """Rooms are single use: a room that ended is remembered in a bounded list of tombstones and refused when it comes again.

    Every method that applies an event returns the lease when it became FREE by this very event (the caller then gives its pages back, once),
    else None. Events that do not apply are ignored and counted in `ignored` by "state/event", "room/unknown", "room/ended" or "generation/stale".
    """

    def __init__(self, num_tombstones: int = 65_536, first_generation: int = 1) -> None:
        if num_tombstones < 1:
            raise InvalidArgument(f"num_tombstones={num_tombstones} must be at least 1")
        self._leases: dict[int, Lease] = {}
        self._tombstones: OrderedDict[int, None] = OrderedDict()
        self._num_tombstones = num_tombstones
        self._next_generation = first_generation
        self.ignored: Counter[str] = Counter()
        #: How leases became FREE: (state before, event) -> how many. And how many became QUARANTINED.
        self.ended: Counter[tuple[LeaseState, LeaseEvent]] = Counter()
        self.num_quarantined = 0

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, room: int) -> Lease | None:
        return self._leases.get(room)

    def reserve(self, room: int, peer: str, num_pages: int) -> Lease:
        """FREE -> RESERVED. Raises InvalidArgument for room 0, a room that is open or one that ended before."""
        if room == 0:
            raise InvalidArgument("room=0 is no room: draw a random 63-bit number above 0")
        if room in self._leases or room in self._tombstones:
            raise InvalidArgument(f"room={room} was used before; a room serves one request only")
        lease = Lease(room, self._next_generation, peer, num_pages)
        self._next_generation = self._next_generation % _MAX_GENERATION + 1
        self._leases[room] = lease
        return lease

    def publish(self, room: int) -> Lease:
        """RESERVED -> PUBLISHED: from here on only a proof frees the pages."""
        lease = self._leases.get(room)
        if lease is None or lease.state is not LeaseState.RESERVED:
            raise InvalidArgument(f"room={room} is {'unknown' if lease is None else lease.state.value}, must be reserved to be published")
        lease.state = LeaseState.PUBLISHED
        return lease

    def landed(self, room: int, generation: int) -> Lease | None:
        """The writer's doorbell with status OK. PUBLISHED becomes LANDED (returns None); a lease that was being aborted is FREE."""
        return self._apply(room, LeaseEvent.LANDED, generation)

    def admit(self, room: int) -> None:
        """LANDED -> RUNNING: the engine owns the pages."""
        self._apply(room, LeaseEvent.ADMIT)

    def release(self, room: int) -> Lease | None:
        return self._apply(room, LeaseEvent.RELEASE)

    def abort(self, room: int) -> Lease | None:
        """Cancel or timeout. FREE at once where nobody can write; PUBLISHED becomes ABORTING: send Revoke and wait for the proof."""
        return self._apply(room, LeaseEvent.ABORT)

    def quiesced(self, room: int, generation: int) -> Lease | None:
        """The writer's word that it stopped and flushed: an answer to Revoke, a refusal, or a doorbell with another status than OK."""
        return self._apply(room, LeaseEvent.QUIESCED, generation)

    def overdue(self, room: int) -> None:
        """No answer to the Revoke in time. Frees nothing."""
        self._apply(room, LeaseEvent.OVERDUE)

    def peer_lost(self, peer: str) -> list[Lease]:
        """The writer cannot be talked to. Its published leases are QUARANTINED until it is fenced. Returns them."""
        lost = [lease for lease in self._leases.values() if lease.peer == peer and after(lease.state, LeaseEvent.OVERDUE)]
        for lease in lost:
            self._apply(lease.room, LeaseEvent.OVERDUE)
        return lost

    def fenced(self, peer: str) -> list[Lease]:
        """Proof that `peer` can write no more (Inbox.fence returned True). Returns the leases that became FREE."""
        rooms = [lease.room for lease in self._leases.values() if lease.peer == peer and after(lease.state, LeaseEvent.FENCED)]
        return [lease for room in rooms if (lease := self._apply(room, LeaseEvent.FENCED)) is not None]

    def num_pages(self, state: LeaseState) -> int:
        """Pages held by leases in `state`."""
        return sum(lease.num_pages for lease in self._leases.values() if lease.state is state)

    def _apply(self, room: int, event: LeaseEvent, generation: int | None = None) -> Lease | None:
        lease = self._leases.get(room)
        if lease is None:
            self.ignored["room/ended" if room in self._tombstones else "room/unknown"] += 1
            return None
        if generation is not None and generation != lease.generation:
            self.ignored["generation/stale"] += 1
            return None
        state = after(lease.state, event)
        if state is None:
            self.ignored[f"{lease.state.value}/{event.value}"] += 1
            return None
        before, lease.state = lease.state, state
        self.num_quarantined += state is LeaseState.QUARANTINED
        if state is not LeaseState.FREE:
            return None
        self.ended[before, event] += 1
        del self._leases[room]
        self._bury(room)
        return lease

    def _bury(self, room: int) -> None:
        self._tombstones[room] = None
        if len(self._tombstones) > self._num_tombstones:
            self._tombstones.popitem(last=False)
