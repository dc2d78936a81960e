"""Where one prefill server may write: an inbox for each of our ranks, as one thing."""

from __future__ import annotations

from collections.abc import Sequence

from baton.kvtransfer import Inbox, RankMemory, Route, TransferError


class Inboxes:
    """Opened and closed together; a fence of it is one of every inbox. Blocking calls wait for the receiving threads, not for a peer."""

    def __init__(self, sender_id: str, inboxes: Sequence[Inbox]) -> None:
        self.sender_id = sender_id
        self._inboxes = tuple(inboxes)

    @classmethod
    def open(cls, sender_id: str, ranks: Sequence[RankMemory], num_doorbells: int) -> Inboxes:
        """num_doorbells: of each. Raises TransferError, and then none is left open."""
        opened: list[Inbox] = []
        try:
            opened.extend(rank.agent.open_inbox(sender_id, rank.region, num_doorbells) for rank in ranks)
        except TransferError:
            for inbox in opened:
                inbox.close()
            raise
        return cls(sender_id, opened)

    def __len__(self) -> int:
        return len(self._inboxes)

    @property
    def invitations(self) -> list[bytes]:
        return [inbox.invitation for inbox in self._inboxes]

    def rank_of(self, inbox: Inbox) -> int | None:
        return next((rank for rank, own in enumerate(self._inboxes) if own is inbox), None)

    def arm(self, routes: Sequence[Route], room: int, generation: int) -> tuple[int, ...]:
        """A doorbell for each route, in its destination rank's inbox. Raises what `Inbox.arm` does, and then none stays armed."""
        slots: list[int] = []
        try:
            slots.extend(self._inboxes[route.destination_rank].arm(room, generation) for route in routes)
        except TransferError:
            self.disarm(routes, slots)
            raise
        return tuple(slots)

    def disarm(self, routes: Sequence[Route], slots: Sequence[int]) -> None:
        """Only after the lease is over."""
        for route, slot in zip(routes, slots, strict=False):
            self._inboxes[route.destination_rank].disarm(slot)

    @property
    def missing(self) -> str:
        """What of this host the way into one of them went through that is gone; "": nothing."""
        return next((missing for inbox in self._inboxes if (missing := inbox.missing)), "")

    def fence(self, identity: bytes | None) -> bool:
        """True: proof for every inbox that nothing lands in it any more. All are shut at the first call, whichever of them has its proof."""
        proofs = [inbox.fence(identity) for inbox in self._inboxes]
        return all(proofs)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()
