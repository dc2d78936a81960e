"""One room on its way in: its reservation, its lease, its doorbell. Not thread safe: the importer's lock guards it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.decode.link import PrefillLink
from baton.engine.layout import KVLayout
from baton.engine.ports import Reservation
from baton.kvtransfer import Doorbell
from baton.workerkit import DecodePeer, PageHash


@dataclass(slots=True)
class Landing:
    """link, slot: set once it is published. waits_until: how long it may wait for a session with its prefill server (time.monotonic()).

    revoke_due: when an unanswered Revoke becomes overdue. failed: the engine was told that it will not land.
    """

    reservation: Reservation
    peer: DecodePeer
    generation: int
    digest: bool
    waits_until: float
    link: PrefillLink | None = None
    slot: int | None = None
    revoke_due: float | None = None
    failed: bool = False

    @property
    def room(self) -> int:
        return self.reservation.room

    @property
    def num_pages(self) -> int:
        return sum(extent.count for extent in self.reservation.pages)

    def problem(self, bell: Doorbell, layout: KVLayout, page_hash: PageHash) -> tuple[str, str] | None:
        """(cause, message) when what landed is not what was asked for. Computes the digest, if one was asked for: call it without the lock."""
        reservation = self.reservation
        if bell.num_tokens != reservation.num_tokens:
            return "length_mismatch", f"prefill wrote {bell.num_tokens} tokens, {reservation.num_tokens} were reserved"
        if bell.first_token < 0:
            return "first_token_missing", "the doorbell carries no first token"
        if not self.digest:
            return None
        if not bell.has_digest:
            return "digest_missing", "a digest was asked for and none came"
        first = reservation.resident_tokens // layout.page_size
        count = layout.pages_for(reservation.num_tokens) - first
        landed = page_hash.of(reservation.pages, first, count)
        if landed != bell.digest:
            return "digest_mismatch", f"the landed pages have digest {landed:016x}, prefill sent {bell.digest:016x}"
        return None
