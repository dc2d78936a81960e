"""KV pages on their way in: the engine's door, the sessions with prefill servers and the transfer library meet here.

Three threads come in: the engine's (KVImporter), the event loop's (sessions, answers, clocks) and the transfer library's notifiers (doorbells).
One lock guards the rooms; nothing under it waits for a peer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor

from baton.decode.landing import Landing
from baton.decode.landing_book import Directory, LandingBook, failure
from baton.decode.link import PrefillLink
from baton.decode.sampling import DigestSampler
from baton.engine.layout import KVLayout
from baton.engine.ports import ImportEvent, Reservation
from baton.engine.types import Failure, Request
from baton.kvtransfer import Inbox, LeaseState, LeaseTable
from baton.servicekit import get_logger
from baton.workerkit import DecodePeer, PageHash

log = get_logger(__name__)


class Importer:
    """Implements the engine's KVImporter over kvtransfer. `link_wait_s`: how long a room waits for a session that is not there (yet).

    layout: of one rank's pool. page_hashes: of each rank's. `revoke_timeout_s`: after that, a Revoke without an answer makes its pages count as
    quarantined; it frees nothing.
    """

    def __init__(
        self,
        layout: KVLayout,
        page_hashes: Sequence[PageHash],
        directory: Directory,
        digests: DigestSampler,
        *,
        link_wait_s: float,
        revoke_timeout_s: float,
    ) -> None:
        self._layout = layout
        self._page_hashes = page_hashes
        self._digests = digests
        self._lock = threading.RLock()
        self._rooms = LandingBook(directory, link_wait_s=link_wait_s, revoke_timeout_s=revoke_timeout_s, prepare=self._prepare, check=self._check)
        self._checks = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
        self._to_compare: list[Landing] = []
        self._on_digest: Callable[[float], None] = lambda waited_s: None

    @property
    def counters(self) -> Counter[str]:
        return self._rooms.counters

    @property
    def leases(self) -> LeaseTable:
        """Whose counts may be read from any thread; nothing else of it."""
        return self._rooms.leases

    # --- the engine's thread --------------------------------------------------------------------------------------------------

    def publish(self, request: Request, reservation: Reservation) -> None:
        peer = request.peer
        assert isinstance(peer, DecodePeer)
        with self._lock:
            self._rooms.publish(reservation, peer, self._digests.wants(reservation.room))

    def abort(self, room: int, failure: Failure) -> None:
        with self._lock:
            self._rooms.abort(room, failure)

    def poll(self) -> list[ImportEvent]:
        with self._lock:
            return self._rooms.take_events()

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._rooms.wake = wake

    def on_digest(self, tell: Callable[[float], None]) -> None:
        """`tell` gets the seconds from a room's last doorbell until its digest was compared, on the digests' thread."""
        self._on_digest = tell

    def quarantined_pages(self) -> int:
        with self._lock:
            return self._rooms.leases.num_pages(LeaseState.QUARANTINED)

    # --- the event loop -------------------------------------------------------------------------------------------------------

    def link_ready(self, address: str) -> None:
        """A session came up: rooms that waited for it are published."""
        with self._lock:
            self._rooms.link_ready(address)

    def link_cut_off(self, link: PrefillLink, reason: str) -> None:
        """Nothing of what prefill writes arrives any more: it is told so, before the session ends."""
        with self._lock:
            self._rooms.cut_off(link, reason)

    def link_lost(self, link: PrefillLink, reason: str, *, way_broke: bool = False) -> None:
        """Prefill cannot be talked to, or cannot write: its rooms will not land, their pages are quarantined until it is fenced."""
        with self._lock:
            self._rooms.lost(link, reason, way_broke=way_broke)

    def link_fenced(self, link: PrefillLink) -> None:
        """Proof that nothing of this session lands any more."""
        with self._lock:
            self._rooms.fenced(link)

    def quiesced(self, room: int, generation: int) -> None:
        """Prefill's word that it stopped and flushed."""
        with self._lock:
            self._rooms.writer_ended(room, generation, failure("CANCELLED", "quiesced", "prefill stopped writing", origin="prefill"))

    def declined(self, room: int, generation: int, failure: Failure) -> None:
        """Prefill will not write this room (any more), and why."""
        with self._lock:
            self._rooms.writer_ended(room, generation, failure)

    def tick(self, now: float) -> None:
        """The clock of what waits for a session and of Revokes without an answer; `now` on time.monotonic()."""
        with self._lock:
            self._rooms.tick(now)

    def has_leases(self, link: PrefillLink) -> bool:
        with self._lock:
            return any(landing.link is link for landing in self._rooms)

    @property
    def num_leases(self) -> int:
        with self._lock:
            return len(self._rooms)

    def ignored(self) -> Iterable[tuple[str, int]]:
        """Events that came twice, late or forged, by kind."""
        with self._lock:
            return list(self._rooms.leases.ignored.items())

    def close(self) -> None:
        """Waits for digests that are being computed. Idempotent."""
        self._checks.shutdown()

    # --- the transfer library's notifiers --------------------------------------------------------------------------------------

    def doorbell(self, inbox: Inbox) -> None:
        """Doorbells rang."""
        bells = inbox.poll()
        with self._lock:
            for bell in bells:
                self._rooms.rung(inbox, bell)
            landings, self._to_compare = self._to_compare, []
        for landing in landings:
            self._begin_to_compare(landing)

    # --- digests ---------------------------------------------------------------------------------------------------------------

    def _prepare(self, landing: Landing) -> None:
        """Under the lock, long before the room lands."""
        landing.digests = self._checks.submit(landing.open_digests, self._layout, self._page_hashes)

    def _check(self, landing: Landing) -> None:
        """Under the lock. Compares what landed with what was asked for; with digests, without the lock."""
        if landing.digest:
            landing.rung_s = time.monotonic()
            self._to_compare.append(landing)
        else:
            self._rooms.checked(landing, landing.problem())

    def _begin_to_compare(self, landing: Landing) -> None:
        """On the notifier's thread, without the lock: the device reads while the digests' thread wakes up to wait for it."""
        try:
            landing.begin_digests(self._layout)
        except CancelledError:
            return  # the room is over, and its digests were never opened
        except Exception as error:
            self._digest_failed(landing, error)
        else:
            self._checks.submit(self._compare, landing)

    def _compare(self, landing: Landing) -> None:
        """On the digests' thread, without the lock: the lease keeps the pages as they are."""
        try:
            problem = landing.problem()
        except CancelledError:
            return  # the room is over, and its digests were never opened
        except Exception as error:
            self._digest_failed(landing, error)
            return
        with self._lock:
            self._rooms.checked(landing, problem)
        self._on_digest(time.monotonic() - landing.rung_s)

    def _digest_failed(self, landing: Landing, error: Exception) -> None:
        log.error("digest failed", room=landing.room, exc_info=error)
        with self._lock:
            self._rooms.checked(landing, ("digest_failed", repr(error)))
