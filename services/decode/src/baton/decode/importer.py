"""KV pages on their way in: the engine's door, the sessions with prefill servers and the transfer library meet here.

Three threads come in: the engine's (KVImporter), the event loop's (sessions, answers, clocks) and the transfer library's notifier (doorbells).
One lock guards the leases; nothing under it waits for a peer. What frees a page is decided by the lease table alone.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from baton.decode.landing import Landing
from baton.decode.link import PrefillLink
from baton.decode.sampling import DigestSampler
from baton.engine.layout import KVLayout
from baton.engine.ports import Freed, ImportEvent, Landed, LandingFailed, Published, Reservation
from baton.engine.types import Failure, Request
from baton.kvtransfer import STATUS_OK, Closed, Doorbell, DoorbellsExhausted, Inbox, InvalidArgument, Lease, LeaseState, LeaseTable
from baton.servicekit import get_logger
from baton.workerkit import DecodePeer, PageHash

log = get_logger(__name__)


class Directory(Protocol):
    """Who is connected. Thread safe, returns at once."""

    def find(self, address: str) -> PrefillLink | None:
        """The session with the prefill server at this bootstrap address, if it is ready; else one is sought from now on."""

    def why_not(self, address: str) -> str:
        """Why there is none, for people."""


class Importer:
    """Implements the engine's KVImporter over kvtransfer. `link_wait_s`: how long a room waits for a session that is not there (yet).

    `revoke_timeout_s`: after that, a Revoke without an answer makes its pages count as quarantined; it frees nothing.
    """

    def __init__(
        self, layout: KVLayout, page_hash: PageHash, directory: Directory, digests: DigestSampler, *, link_wait_s: float, revoke_timeout_s: float
    ) -> None:
        self._layout = layout
        self._page_hash = page_hash
        self._directory = directory
        self._digests = digests
        self._link_wait_s = link_wait_s
        self._revoke_timeout_s = revoke_timeout_s
        self._lock = threading.RLock()
        self._leases = LeaseTable()
        self._landings: dict[int, Landing] = {}
        self._unlinked: dict[int, Landing] = {}
        self._events: list[ImportEvent] = []
        self._wake: Callable[[], None] = lambda: None
        self._checks = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
        self.counters: Counter[str] = Counter()

    # --- the engine's thread --------------------------------------------------------------------------------------------------

    def publish(self, request: Request, reservation: Reservation) -> None:
        peer = request.peer
        assert isinstance(peer, DecodePeer)
        room = reservation.room
        with self._lock:
            try:
                lease = self._leases.reserve(room, "", sum(extent.count for extent in reservation.pages))
            except InvalidArgument as error:
                self._say(LandingFailed(room, _failure("ALREADY_EXISTS", "room_used", str(error))), Freed(room))
                return
            waits_until = time.monotonic() + self._link_wait_s
            landing = Landing(reservation, peer, lease.generation, self._digests.wants(room), waits_until)
            self._landings[room] = landing
            self._unlinked[room] = landing
            self._try_publish(landing)

    def abort(self, room: int, failure: Failure) -> None:
        with self._lock:
            landing = self._landings.get(room)
            if landing is None:
                # Landed was said but not heard yet: the lease is over, so the engine gets its pages by the word that it now waits for.
                self._events = [Freed(room) if isinstance(event, Landed) and event.room == room else event for event in self._events]
                return
            landing.failed = True  # the engine knows
            self._abort(landing, failure)

    def poll(self) -> list[ImportEvent]:
        with self._lock:
            events, self._events = self._events, []
            return events

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def quarantined_pages(self) -> int:
        with self._lock:
            return self._leases.num_pages(LeaseState.QUARANTINED)

    # --- the event loop -------------------------------------------------------------------------------------------------------

    def link_ready(self, address: str) -> None:
        """A session came up: rooms that waited for it are published."""
        with self._lock:
            for landing in [landing for landing in self._unlinked.values() if landing.peer.bootstrap_address == address]:
                self._try_publish(landing)

    def link_lost(self, link: PrefillLink, reason: str) -> None:
        """Prefill cannot be talked to: its rooms will not land, their pages are quarantined until it is fenced."""
        with self._lock:
            for lease in self._leases.peer_lost(link.key):
                landing = self._landings[lease.room]
                landing.revoke_due = None
                text = f"prefill server {link.instance_id} at {link.address} was lost while room {lease.room} was in transfer: {reason}"
                self._fail(landing, _failure("UNAVAILABLE", "prefill_lost", text, origin="prefill"))

    def link_fenced(self, link: PrefillLink) -> None:
        """Proof that nothing of this session lands any more."""
        with self._lock:
            for lease in self._leases.fenced(link.key):
                self._freed(lease)

    def quiesced(self, room: int, generation: int) -> None:
        """Prefill's word that it stopped and flushed."""
        self._writer_ended(room, generation, _failure("CANCELLED", "quiesced", "prefill stopped writing", origin="prefill"))

    def declined(self, room: int, generation: int, failure: Failure) -> None:
        """Prefill will not write this room (any more), and why."""
        self._writer_ended(room, generation, failure)

    def tick(self, now: float) -> None:
        """The clock of what waits for a session and of Revokes without an answer; `now` on time.monotonic()."""
        with self._lock:
            for landing in [landing for landing in self._unlinked.values() if landing.waits_until <= now]:
                self._give_up(landing)
            for landing in list(self._landings.values()):
                if landing.revoke_due is not None and landing.revoke_due <= now:
                    landing.revoke_due = None
                    self.counters["revoke_overdue"] += 1
                    log.warning("revoke without an answer", room=landing.room, pages=landing.num_pages)
                    self._leases.overdue(landing.room)
                    self._wake()  # no event, but the engine's counts have changed

    def has_leases(self, link: PrefillLink) -> bool:
        with self._lock:
            return any(landing.link is link for landing in self._landings.values())

    @property
    def num_leases(self) -> int:
        with self._lock:
            return len(self._landings)

    def close(self) -> None:
        """Waits for digests that are being computed. Idempotent."""
        self._checks.shutdown()

    # --- the transfer library's notifier ---------------------------------------------------------------------------------------

    def doorbell(self, inbox: Inbox) -> None:
        """Doorbells rang."""
        bells = inbox.poll()
        with self._lock:
            for bell in bells:
                self._rung(bell)

    # --- inside, under the lock --------------------------------------------------------------------------------------------------

    def _try_publish(self, landing: Landing) -> None:
        peer = landing.peer
        link = self._directory.find(peer.bootstrap_address)
        if link is None or link.instance_id != peer.prefill_instance_id:
            return  # it may come (back) until waits_until
        room, reservation = landing.room, landing.reservation
        try:
            slot = link.inbox.arm(room, landing.generation)
        except DoorbellsExhausted as error:
            self._end_unpublished(landing, _failure("RESOURCE_EXHAUSTED", "doorbells_exhausted", str(error)))
            return
        except Closed:
            return  # the session has just ended: the next one will do
        del self._unlinked[room]
        landing.link, landing.slot = link, slot
        lease = self._leases.publish(room)
        lease.peer = link.key
        self._say(Published(room))
        link.publish(
            room,
            landing.generation,
            reservation.pages,
            num_tokens=reservation.num_tokens,
            resident_tokens=reservation.resident_tokens,
            doorbell=slot,
            digest=landing.digest,
            ticket=peer.ticket,
        )

    def _give_up(self, landing: Landing) -> None:
        peer = landing.peer
        link = self._directory.find(peer.bootstrap_address)
        if link is None:
            text = f"no session with prefill server {peer.prefill_instance_id} at {peer.bootstrap_address} within {self._link_wait_s:g} s: "
            text += self._directory.why_not(peer.bootstrap_address)
        else:
            text = f"at {peer.bootstrap_address} is prefill server {link.instance_id}, the gateway named {peer.prefill_instance_id}"
        self._end_unpublished(landing, _failure("UNAVAILABLE", "prefill_unreachable", text, origin="prefill"))

    def _end_unpublished(self, landing: Landing, failure: Failure) -> None:
        self._fail(landing, failure)
        self._abort(landing, failure)

    def _abort(self, landing: Landing, failure: Failure) -> None:
        self._unlinked.pop(landing.room, None)
        freed = self._leases.abort(landing.room)
        if freed is not None:
            self._freed(freed)
            return
        lease = self._leases.get(landing.room)
        if lease is not None and lease.state is LeaseState.ABORTING and landing.link is not None and landing.revoke_due is None:
            landing.revoke_due = time.monotonic() + self._revoke_timeout_s
            landing.link.revoke(landing.room, landing.generation, failure)

    def _writer_ended(self, room: int, generation: int, failure: Failure) -> None:
        with self._lock:
            lease = self._leases.quiesced(room, generation)
            if lease is None:
                return
            self._fail(self._landings[room], failure)
            self._freed(lease)

    def _rung(self, bell: Doorbell) -> None:
        landing = self._landings.get(bell.room)
        if landing is None or landing.generation != bell.generation:
            self.counters["doorbell_stale"] += 1
            return
        if bell.status != STATUS_OK:
            text = f"prefill gave room {bell.room} up (doorbell status {bell.status})"
            self._writer_ended(bell.room, bell.generation, _failure("ABORTED", "declined", text, origin="prefill"))
            return
        lease = self._leases.landed(bell.room, bell.generation)
        if lease is not None:  # it landed after all, but nobody wants it: its last write is over
            self._freed(lease)
            return
        if landing.digest:
            self._checks.submit(self._check, landing, bell)
        else:
            self._check(landing, bell)

    def _check(self, landing: Landing, bell: Doorbell) -> None:
        """Compares what landed with what was asked for. With a digest it runs on the digest's thread, without the lock."""
        try:
            problem = landing.problem(bell, self._layout, self._page_hash)
        except Exception as error:
            log.exception("digest failed", room=landing.room)
            problem = ("digest_failed", repr(error))
        with self._lock:
            lease = self._leases.get(landing.room)
            if self._landings.get(landing.room) is not landing or lease is None or lease.state is not LeaseState.LANDED:
                return  # aborted meanwhile: the lease is over
            if problem is None:
                self._landed(landing, bell)
            else:
                cause, text = problem
                self.counters[cause] += 1
                self._fail(landing, _failure("DATA_LOSS", cause, f"room {landing.room}: {text}", origin="transfer"))
                freed = self._leases.release(landing.room)
                assert freed is not None
                self._freed(freed)

    def _landed(self, landing: Landing, bell: Doorbell) -> None:
        assert landing.link is not None
        exposed_s = 0.0
        if landing.link.shares_clock and bell.last_layer_ns:
            exposed_s = max(0.0, time.monotonic() - bell.last_layer_ns / 1e9)
        self._leases.admit(landing.room)
        self._leases.release(landing.room)
        self._forget(landing)
        self._say(Landed(landing.room, bell.first_token, landing.digest, exposed_s))

    def _fail(self, landing: Landing, failure: Failure) -> None:
        if not landing.failed:
            landing.failed = True
            self._say(LandingFailed(landing.room, failure))

    def _freed(self, lease: Lease) -> None:
        landing = self._landings[lease.room]
        self._forget(landing)
        self._say(Freed(lease.room))

    def _forget(self, landing: Landing) -> None:
        """The lease is over: its doorbell may ring for another room."""
        del self._landings[landing.room]
        self._unlinked.pop(landing.room, None)
        if landing.link is not None and landing.slot is not None:
            landing.link.inbox.disarm(landing.slot)

    def _say(self, *events: ImportEvent) -> None:
        self._events.extend(events)
        self._wake()

    def ignored(self) -> Iterable[tuple[str, int]]:
        """Events that came twice, late or forged, by kind."""
        with self._lock:
            return list(self._leases.ignored.items())


def _failure(code: str, cause: str, message: str, *, origin: str = "decode") -> Failure:
    return Failure(code, origin, cause, message)
