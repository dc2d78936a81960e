"""All rooms on their way in: how each is published, ends, and what is said of it. Not thread safe: the importer's lock guards it.

What frees a page is decided by the lease table alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from baton.decode.landing import Landing
from baton.decode.link import PrefillLink
from baton.engine.ports import Freed, ImportEvent, Landed, LandingFailed, Published, Reservation
from baton.engine.types import Failure
from baton.kvtransfer import Closed, Doorbell, DoorbellsExhausted, Inbox, InvalidArgument, Lease, LeaseState, LeaseTable
from baton.servicekit import get_logger
from baton.workerkit import DecodePeer

log = get_logger(__name__)


class Directory(Protocol):
    """Who is connected. Thread safe, returns at once."""

    def find(self, address: str) -> PrefillLink | None:
        """The session with the prefill server at this bootstrap address, if it is ready; else one is sought from now on."""

    def why_not(self, address: str) -> str:
        """Why there is none, for people."""


class LandingBook:
    """link_wait_s, revoke_timeout_s: as of the importer. prepare: called with a room that was published and wants a digest. check: called with one
    that has landed; it says in `checked` what is wrong with it."""

    def __init__(
        self,
        directory: Directory,
        *,
        link_wait_s: float,
        revoke_timeout_s: float,
        prepare: Callable[[Landing], None],
        check: Callable[[Landing], None],
    ) -> None:
        self._directory = directory
        self._link_wait_s = link_wait_s
        self._revoke_timeout_s = revoke_timeout_s
        self._prepare = prepare
        self._check = check
        self._landings: dict[int, Landing] = {}
        self._unlinked: dict[int, Landing] = {}
        self._events: list[ImportEvent] = []
        self.leases = LeaseTable()
        self.wake: Callable[[], None] = lambda: None
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._landings)

    def __iter__(self) -> Iterator[Landing]:
        return iter(list(self._landings.values()))

    def take_events(self) -> list[ImportEvent]:
        events, self._events = self._events, []
        return events

    def publish(self, reservation: Reservation, peer: DecodePeer, digest: bool) -> None:
        """RESERVED, and PUBLISHED as soon as there is a session with the room's prefill server."""
        room = reservation.room
        try:
            lease = self.leases.reserve(room, "", reservation.num_own_pages)
        except InvalidArgument as error:
            self._say(LandingFailed(room, failure("ALREADY_EXISTS", "room_used", str(error))), Freed(room))
            return
        landing = Landing(reservation, peer, lease.generation, digest, time.monotonic() + self._link_wait_s)
        self._landings[room] = self._unlinked[room] = landing
        self._try_publish(landing)

    def link_ready(self, address: str) -> None:
        for landing in list(self._unlinked.values()):
            if landing.peer.bootstrap_address == address:
                self._try_publish(landing)

    def abort(self, room: int, why: Failure) -> None:
        landing = self._landings.get(room)
        if landing is None:
            # Landed was said but not heard yet: the lease is over, so the engine gets its pages by the word that it now waits for.
            self._events = [Freed(room) if isinstance(event, Landed) and event.room == room else event for event in self._events]
            return
        landing.failed = True  # the engine knows
        self._abort(landing, why)

    def cut_off(self, link: PrefillLink, reason: str) -> None:
        for landing in self._landings.values():
            if landing.link is link:
                link.revoke(landing.room, landing.generation, _way_lost(link, landing.room, reason))

    def lost(self, link: PrefillLink, reason: str, *, way_broke: bool) -> None:
        for lease in self.leases.peer_lost(link.key):
            landing = self._landings[lease.room]
            landing.revoke_due = None
            text = f"prefill server {link.instance_id} at {link.address} was lost while room {lease.room} was in transfer: {reason}"
            gone = failure("UNAVAILABLE", "prefill_lost", text, origin="prefill")
            self._fail(landing, _way_lost(link, lease.room, reason) if way_broke else gone)

    def fenced(self, link: PrefillLink) -> None:
        for lease in self.leases.fenced(link.key):
            self._freed(lease)

    def writer_ended(self, room: int, generation: int, why: Failure) -> None:
        """The writer's word that it stopped and flushed, on every way."""
        lease = self.leases.quiesced(room, generation)
        if lease is not None:
            self._fail(self._landings[room], why)
            self._freed(lease)

    def rung(self, inbox: Inbox, bell: Doorbell) -> None:
        """The room lands with the last of its doorbells."""
        landing = self._landings.get(bell.room)
        rank = None if landing is None or landing.link is None else landing.link.inboxes.rank_of(inbox)
        if landing is None or landing.generation != bell.generation or rank is None:
            self.counters["doorbell_stale"] += 1
            return
        landing.bells.append((rank, bell))
        if not landing.all_rung:
            return
        if landing.given_up is not None:
            text = f"prefill gave room {bell.room} up (doorbell status {landing.given_up})"
            self.writer_ended(bell.room, bell.generation, failure("ABORTED", "declined", text, origin="prefill"))
            return
        lease = self.leases.landed(bell.room, bell.generation)
        if lease is not None:  # it landed after all, but nobody wants it: its last write is over
            self._freed(lease)
            return
        self._check(landing)

    def checked(self, landing: Landing, problem: tuple[str, str] | None) -> None:
        lease = self.leases.get(landing.room)
        if self._landings.get(landing.room) is not landing or lease is None or lease.state is not LeaseState.LANDED:
            return  # aborted meanwhile: the lease is over
        if problem is None:
            self._landed(landing)
            return
        cause, text = problem
        self.counters[cause] += 1
        self._fail(landing, failure("DATA_LOSS", cause, f"room {landing.room}: {text}", origin="transfer"))
        freed = self.leases.release(landing.room)
        assert freed is not None
        self._freed(freed)

    def tick(self, now: float) -> None:
        for landing in [landing for landing in self._unlinked.values() if landing.waits_until <= now]:
            self._give_up(landing)
        for landing in self:
            if landing.revoke_due is not None and landing.revoke_due <= now:
                landing.revoke_due = None
                self.counters["revoke_overdue"] += 1
                log.warning("revoke without an answer", room=landing.room, pages=landing.num_pages)
                self.leases.overdue(landing.room)
                self.wake()  # no event, but the engine's counts have changed

    def _try_publish(self, landing: Landing) -> None:
        peer = landing.peer
        link = self._directory.find(peer.bootstrap_address)
        if link is None or link.instance_id != peer.prefill_instance_id:
            return  # it may come (back) until waits_until
        room, reservation = landing.room, landing.reservation
        try:
            slots = link.arm(room, landing.generation)
        except DoorbellsExhausted as error:
            self._end_unpublished(landing, failure("RESOURCE_EXHAUSTED", "doorbells_exhausted", str(error)))
            return
        except Closed:
            return  # the session has just ended: the next one will do
        del self._unlinked[room]
        landing.link, landing.slots = link, slots
        self.leases.publish(room).peer = link.key
        self._say(Published(room))
        link.publish(
            room,
            landing.generation,
            reservation.pages,
            num_tokens=reservation.num_tokens,
            resident_tokens=reservation.resident_tokens,
            doorbells=slots,
            digest=landing.digest,
            ticket=peer.ticket,
        )
        if landing.digest:
            self._prepare(landing)

    def _give_up(self, landing: Landing) -> None:
        peer = landing.peer
        link = self._directory.find(peer.bootstrap_address)
        if link is None:
            text = f"no session with prefill server {peer.prefill_instance_id} at {peer.bootstrap_address} within {self._link_wait_s:g} s: "
            text += self._directory.why_not(peer.bootstrap_address)
        else:
            text = f"at {peer.bootstrap_address} is prefill server {link.instance_id}, the gateway named {peer.prefill_instance_id}"
        self._end_unpublished(landing, failure("UNAVAILABLE", "prefill_unreachable", text, origin="prefill"))

    def _end_unpublished(self, landing: Landing, why: Failure) -> None:
        self._fail(landing, why)
        self._abort(landing, why)

    def _abort(self, landing: Landing, why: Failure) -> None:
        self._unlinked.pop(landing.room, None)
        freed = self.leases.abort(landing.room)
        if freed is not None:
            self._freed(freed)
            return
        lease = self.leases.get(landing.room)
        if lease is not None and lease.state is LeaseState.ABORTING and landing.link is not None and landing.revoke_due is None:
            landing.revoke_due = time.monotonic() + self._revoke_timeout_s
            landing.link.revoke(landing.room, landing.generation, why)

    def _landed(self, landing: Landing) -> None:
        assert landing.link is not None
        exposed_s = 0.0
        if landing.link.shares_clock and landing.last_layer_ns:
            exposed_s = max(0.0, time.monotonic() - landing.last_layer_ns / 1e9)
        self.leases.admit(landing.room)
        self.leases.release(landing.room)
        self._forget(landing)
        self._say(Landed(landing.room, landing.first_token, landing.digest, exposed_s))

    def _fail(self, landing: Landing, why: Failure) -> None:
        if not landing.failed:
            landing.failed = True
            self._say(LandingFailed(landing.room, why))

    def _freed(self, lease: Lease) -> None:
        self._forget(self._landings[lease.room])
        self._say(Freed(lease.room))

    def _forget(self, landing: Landing) -> None:
        """The lease is over: its doorbells may ring for other rooms."""
        del self._landings[landing.room]
        self._unlinked.pop(landing.room, None)
        if landing.digests is not None:
            landing.digests.cancel()  # where nobody began with them yet
        if landing.link is not None:
            landing.link.disarm(landing.slots)

    def _say(self, *events: ImportEvent) -> None:
        self._events.extend(events)
        self.wake()


def failure(code: str, cause: str, message: str, *, origin: str = "decode") -> Failure:
    return Failure(code, origin, cause, message)


def _way_lost(link: PrefillLink, room: int, reason: str) -> Failure:
    """Both servers may be well."""
    text = f"room {room} was in transfer from prefill server {link.instance_id} at {link.address}: {reason}"
    return failure("UNAVAILABLE", "way_lost", text, origin="transfer")
