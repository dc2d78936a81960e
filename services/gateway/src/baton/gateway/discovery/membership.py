"""Which places the fleet has, from everything that names one. Pure."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from baton.gateway.worker import Leg

#: Removed by an operator and not to come back by themselves; the oldest is forgotten first.
MAX_REMEMBERED_REMOVALS = 4096


class Source(enum.Enum):
    """Who names a worker."""

    NAMED = "named"
    ADDED = "added"
    REGISTERED = "registered"
    ETCD = "etcd"


@dataclass(frozen=True, slots=True)
class Offer:
    """One source's word that a worker is at an address. `key`: the instance that says it; the address where the source knows no instances."""

    source: Source
    key: str
    leg: Leg
    address: str


class Membership:
    """The union of all sources. A place is an address; it is there as long as any offer names it.

    So a process that took over a dead one's address keeps its place when the dead one's lease ends. Where two offers name one address in
    different roles, the younger one is right.
    """

    def __init__(self) -> None:
        self._offers: dict[tuple[Source, str], Offer] = {}  # the youngest last
        self._removed: OrderedDict[tuple[Source, str], None] = OrderedDict()
        #: Why an address was let go last, for the log.
        self._reasons: dict[str, str] = {}

    def put(self, offer: Offer) -> bool:
        """False: an operator removed it, and it stays away."""
        key = (offer.source, offer.key)
        if key in self._removed:
            return False
        before = self._offers.pop(key, None)
        if before is not None and before.address != offer.address:
            self._reasons[before.address] = f"{offer.key} is now at {offer.address}"
        self._offers[key] = offer
        return True

    def drop(self, source: Source, key: str, reason: str) -> bool:
        """The source takes its word back; False when it had not given it."""
        offer = self._offers.pop((source, key), None)
        if offer is not None:
            self._reasons[offer.address] = reason
        return offer is not None

    def remove(self, address: str, reason: str) -> None:
        """An operator's: whoever names the address now may not name it again. Another process there may."""
        for key, offer in list(self._offers.items()):
            if offer.address == address:
                del self._offers[key]
                if offer.source in (Source.REGISTERED, Source.ETCD):
                    self._removed[key] = None
        while len(self._removed) > MAX_REMEMBERED_REMOVALS:
            self._removed.popitem(last=False)
        self._reasons[address] = reason

    def of(self, source: Source) -> dict[str, Offer]:
        """By key."""
        return {key: offer for (origin, key), offer in self._offers.items() if origin is source}

    def places(self) -> dict[str, Leg]:
        """Address -> role of every place that is named."""
        return {offer.address: offer.leg for offer in self._offers.values()}

    def sources(self, address: str) -> list[str]:
        """Who names it, in words, sorted."""
        return sorted({offer.source.value for offer in self._offers.values() if offer.address == address})

    def address_of(self, instance_id: str) -> str | None:
        """Where an instance said that it is."""
        return next((offer.address for (_, key), offer in self._offers.items() if key == instance_id), None)

    def why_gone(self, addresses: Iterable[str]) -> dict[str, str]:
        """Takes the reasons for which `addresses` are named no more."""
        return {address: self._reasons.pop(address, "nobody names it any more") for address in addresses}
