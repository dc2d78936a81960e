"""Where one sender may write, over UCX."""

from __future__ import annotations

import threading
from collections.abc import Callable

from baton.kvtransfer import _native
from baton.kvtransfer.base import Inbox, InboxStats
from baton.kvtransfer.checks import room_number, whole
from baton.kvtransfer.doorbell import Doorbell
from baton.kvtransfer.errors import Closed, DoorbellsExhausted, InvalidArgument
from baton.kvtransfer.identity import Identity, is_gone
from baton.kvtransfer.ucx import footholds
from baton.kvtransfer.ucx.birthplace import Birthplace

_FULL, _SHUT = -1, -2


class UcxInbox(Inbox):
    def __init__(
        self,
        sender_id: str,
        native: _native.Inbox,
        receiver: _native.Receiver,
        invitation: bytes,
        num_doorbells: int,
        is_shared: bool,
        here: Identity,
        birthplace: Birthplace,
        forget: Callable[[], object],
    ) -> None:
        self.native = native
        self._sender_id = sender_id
        self._receiver = receiver
        self._invitation = invitation
        self._num_doorbells = num_doorbells
        self._is_shared = is_shared
        self._here = here
        self._birthplace = birthplace
        self._forget = forget
        self._lock = threading.Lock()
        self._is_fenced = False
        self._is_closed = False
        self._ways_back: dict[int, tuple[footholds.Foothold, ...]] = {}

    @property
    def sender_id(self) -> str:
        return self._sender_id

    @property
    def invitation(self) -> bytes:
        return self._invitation

    def arm(self, room: int, generation: int) -> int:
        self._birthplace.require()
        room, generation = room_number(room), whole("generation", generation, 1, (1 << 32) - 1)
        slot = self.native.arm(room, generation)
        if slot == _FULL:
            raise DoorbellsExhausted(f"inbox of {self._sender_id}: all {self._num_doorbells} doorbells (num_doorbells) are armed")
        if slot == _SHUT:
            raise Closed(f"inbox of {self._sender_id} is fenced or closed")
        self._receiver.armed()
        return slot

    def disarm(self, slot: int) -> None:
        self._birthplace.require()
        if not 0 <= slot < self._num_doorbells or not self.native.disarm(slot):
            raise InvalidArgument(f"slot={slot} of the inbox of {self._sender_id} is not armed")

    def poll(self) -> list[Doorbell]:
        self._birthplace.require()
        return [
            Doorbell(room, generation, num_tokens, first_token, flags & 0xFFFF, digest, bool(flags >> 16 & 1), last_layer_ns)
            for room, generation, flags, num_tokens, first_token, digest, last_layer_ns in self.native.poll()
        ]

    def fence(self, identity: bytes | None) -> bool:
        self._birthplace.require()
        with self._lock:
            if self._is_fenced:
                return True
            self._receiver.shut(self.native)
            self._is_fenced = not self._is_shared or self.native.has_no_writers or self._process_is_gone(identity)
            return self._is_fenced

    def _process_is_gone(self, identity: bytes | None) -> bool:
        return identity is not None and is_gone(Identity.decode(identity), self._here)

    @property
    def missing(self) -> str:
        self._birthplace.require()
        links = self.native.links
        if links is None:
            return ""  # busy: nothing is cut off
        self._ways_back = {link: self._ways_back.get(link) or footholds.of(self.native.link_info(link)) for link in links}
        found = [footholds.missing(way) for way in self._ways_back.values()]
        return "; ".join(dict.fromkeys(found)) if all(found) else ""

    @property
    def stats(self) -> InboxStats:
        self._birthplace.require()
        return InboxStats(*self.native.counters)

    def close(self) -> None:
        if self._birthplace.is_elsewhere:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._receiver.forget(self.native)
        self._forget()
