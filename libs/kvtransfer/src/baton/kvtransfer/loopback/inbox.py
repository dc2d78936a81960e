"""Where one sender may write, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from baton.kvtransfer import doorbell as records
from baton.kvtransfer.base import Inbox, InboxStats
from baton.kvtransfer.checks import room_number, whole
from baton.kvtransfer.doorbell import RECORD_BYTES, Doorbell
from baton.kvtransfer.errors import Closed, DoorbellsExhausted, InvalidArgument
from baton.kvtransfer.loopback.region import LoopbackRegion


class LoopbackInbox(Inbox):
    """Writers copy into `region` and store real records in `slots`: what a forged or late one does is what it does over UCX."""

    def __init__(
        self,
        sender_id: str,
        region: LoopbackRegion,
        nonce: int,
        num_doorbells: int,
        on_ring: Callable[[LoopbackInbox], None],
        forget: Callable[[], object],
    ) -> None:
        self.region = region
        self.nonce = nonce
        self.encoded = b""
        self._sender_id = sender_id
        self._on_ring = on_ring
        self._forget = forget
        self._lock = threading.Lock()
        self._slots = bytearray(num_doorbells * RECORD_BYTES)
        self._free = list(range(num_doorbells - 1, -1, -1))
        self._armed: dict[int, tuple[int, int]] = {}
        self._waiting: set[int] = set()
        self._rung: list[Doorbell] = []
        self._counts = {"num_rung": 0, "num_stale": 0, "num_invalid": 0}
        self._num_writers = 0
        self._is_shut = False

    @property
    def sender_id(self) -> str:
        return self._sender_id

    @property
    def invitation(self) -> bytes:
        return self.encoded

    def arm(self, room: int, generation: int) -> int:
        room, generation = room_number(room), whole("generation", generation, 1, (1 << 32) - 1)
        with self._lock:
            if self._is_shut:
                raise Closed(f"inbox of {self._sender_id} is fenced or closed")
            if not self._free:
                raise DoorbellsExhausted(f"inbox of {self._sender_id}: all {len(self._armed)} doorbells (num_doorbells) are armed")
            slot = self._free.pop()
            self._slots[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = bytes(RECORD_BYTES)
            self._armed[slot] = (room, generation)
            self._waiting.add(slot)
            return slot

    def disarm(self, slot: int) -> None:
        with self._lock:
            if self._armed.pop(slot, None) is None:
                raise InvalidArgument(f"slot={slot} of the inbox of {self._sender_id} is not armed")
            self._waiting.discard(slot)
            self._free.append(slot)

    def poll(self) -> list[Doorbell]:
        with self._lock:
            rung, self._rung = self._rung, []
            return rung

    def fence(self, identity: bytes | None) -> bool:
        with self._lock:
            self._is_shut = True
            return self._num_writers == 0

    @property
    def missing(self) -> str:
        return ""

    @property
    def stats(self) -> InboxStats:
        with self._lock:
            return InboxStats(**self._counts)

    def close(self) -> None:
        self.fence(None)
        self._forget()

    def admit_writer(self) -> bool:
        """A sender connects. False: fenced."""
        with self._lock:
            if self._is_shut:
                return False
            self._num_writers += 1
            return True

    def dismiss_writer(self) -> None:
        with self._lock:
            self._num_writers -= 1

    @property
    def num_doorbells(self) -> int:
        return len(self._slots) // RECORD_BYTES

    def ring(self, slot: int, record: bytes) -> None:
        """A sender's one-sided write of a doorbell, whatever is in it."""
        with self._lock:
            self._slots[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record
            if slot not in self._waiting:
                return
            doorbell = records.decode(record, self.nonce)
            if doorbell is None:
                self._counts["num_invalid"] += 1
                return
            if (doorbell.room, doorbell.generation) != self._armed[slot]:
                self._counts["num_stale"] += 1
                return
            self._waiting.discard(slot)
            self._rung.append(doorbell)
            self._counts["num_rung"] += 1
        self._on_ring(self)
