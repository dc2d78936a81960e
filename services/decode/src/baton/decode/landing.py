"""One room on its way in: its reservation, its lease, its doorbells. Not thread safe: the importer's lock guards it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.decode.link import PrefillLink
from baton.engine.layout import KVLayout
from baton.engine.ports import Reservation
from baton.kvtransfer import STATUS_OK, Doorbell, routes_into
from baton.kvtransfer.routes import own_heads
from baton.workerkit import DecodePeer, PageHash, PagesDigest


@dataclass(slots=True)
class Landing:
    """link, slots: set once it is published; a doorbell for each of the link's routes. waits_until: how long it may wait for a session with its
    prefill server (time.monotonic()).

    bells: those that rang, each once, with the rank in whose inbox it did. digests: of what each route brings, with the rank that it leads into;
    begun when the room is published, if digests were asked for. rung_s: when the last bell was heard (time.monotonic()). revoke_due: when an
    unanswered Revoke becomes overdue. failed: the engine was told that it will not land.
    """

    reservation: Reservation
    peer: DecodePeer
    generation: int
    digest: bool
    waits_until: float
    link: PrefillLink | None = None
    slots: tuple[int, ...] = ()
    bells: list[tuple[int, Doorbell]] = field(default_factory=list)
    digests: Future[list[tuple[int, PagesDigest]]] | None = None
    rung_s: float = 0.0
    revoke_due: float | None = None
    failed: bool = False

    @property
    def room(self) -> int:
        return self.reservation.room

    @property
    def num_pages(self) -> int:
        """Those that may be written."""
        return self.reservation.num_own_pages

    @property
    def all_rung(self) -> bool:
        """Every rank of the sender has written its last."""
        return bool(self.slots) and len(self.bells) == len(self.slots)

    @property
    def given_up(self) -> int | None:
        """The status of a doorbell that says no, if one does."""
        return next((bell.status for _, bell in self.bells if bell.status != STATUS_OK), None)

    @property
    def first_token(self) -> int:
        return self.bells[0][1].first_token

    @property
    def last_layer_ns(self) -> int:
        return max(bell.last_layer_ns for _, bell in self.bells)

    def open_digests(self, layout: KVLayout, page_hashes: Sequence[PageHash]) -> list[tuple[int, PagesDigest]]:
        """For `digests`: what they need is made while prefill computes. layout, page_hashes: of one rank's pool, of each rank's pages."""
        assert self.link is not None
        first, count = self._written_pages(layout)
        opened = []
        for rank, page_hash in enumerate(page_hashes):
            for number in routes_into(self.link.routes, rank):
                route = self.link.routes[number]
                digest = page_hash.open(self.reservation.pages, first, count, own_heads(route.destination_head, route.num_heads, layout))
                digest.prepare()
                opened.append((rank, digest))
        return opened

    def begin_digests(self, layout: KVLayout) -> None:
        """All pages are there: those that can be read without waiting are read from now on. Nothing where the digests are not open yet."""
        if self.digests is None or not self.digests.done():
            return
        _, count = self._written_pages(layout)
        for _, digest in self.digests.result():
            digest.ahead(range(layout.num_layers), 0, count, None)

    def _written_pages(self, layout: KVLayout) -> tuple[int, int]:
        """(first, count) of the prompt's pages that are written: not those that were resident."""
        first = self.reservation.resident_tokens // layout.page_size
        return first, layout.pages_for(self.reservation.num_tokens) - first

    def problem(self) -> tuple[str, str] | None:
        """(cause, message) when what landed is not what was asked for. Waits for the digests, if they were asked for: call it without the lock.
        Raises what opening and computing them raised."""
        for _, bell in self.bells:
            if bell.num_tokens != self.reservation.num_tokens:
                return "length_mismatch", f"prefill wrote {bell.num_tokens} tokens, {self.reservation.num_tokens} were reserved"
            if bell.first_token < 0:
                return "first_token_missing", "the doorbell carries no first token"
            if bell.first_token != self.first_token:
                return "first_token_differs", f"the sender's ranks drew {self.first_token} and {bell.first_token}"
            if self.digest and not bell.has_digest:
                return "digest_missing", "a digest was asked for and none came"
        return self._digest_problem() if self.digest else None

    def _digest_problem(self) -> tuple[str, str] | None:
        assert self.digests is not None
        values = [(rank, digest.value()) for rank, digest in self.digests.result()]
        ranks = sorted({rank for rank, _ in values})
        for rank in ranks:
            # A doorbell does not say which route it ends; each route has other heads, so all of them are right when the set of digests is.
            sent = sorted(bell.digest for into, bell in self.bells if into == rank)
            landed = sorted(value for into, value in values if into == rank)
            if landed != sent:
                here, there = (", ".join(f"{value:016x}" for value in each) for each in (landed, sent))
                where = f" of rank {rank}" if len(ranks) > 1 else ""
                return "digest_mismatch", f"the landed pages{where} have digest {here}, prefill sent {there}"
        return None
