"""The way into one inbox of this process."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.kvtransfer.base import Peer, ProbePoint, WriteState
from baton.kvtransfer.checks import room_number
from baton.kvtransfer.errors import Closed, PeerLost
from baton.kvtransfer.loopback.inbox import LoopbackInbox
from baton.kvtransfer.loopback.region import LoopbackRegion
from baton.kvtransfer.loopback.write import LoopbackWriteHandle

_PROBE_SIZES = (64 << 10, 1 << 20)
_CLOSE_TIMEOUT_S = 2.0


class LoopbackPeer(Peer):
    def __init__(
        self,
        instance_id: str,
        inbox: LoopbackInbox,
        source: LoopbackRegion,
        submit: Callable[[LoopbackWriteHandle], None],
        ended: Callable[[LoopbackWriteHandle], None],
    ) -> None:
        self._instance_id = instance_id
        self._inbox = inbox
        self._source = source
        self._submit = submit
        self._ended = ended
        self._handles: list[LoopbackWriteHandle] = []
        self._why_lost = ""
        self._missing = ""
        self._is_closed = False

    @property
    def instance_id(self) -> str:
        return self._instance_id

    @property
    def transport(self) -> str:
        return "loopback"

    @property
    def is_lost(self) -> bool:
        return bool(self._why_lost)

    @property
    def missing(self) -> str:
        return self._missing

    def check(self) -> bool:
        return not self.is_lost

    def begin(self, room: int) -> LoopbackWriteHandle:
        room = room_number(room)
        if self._is_closed:
            raise Closed(f"the peer {self._instance_id} is closed")
        if self._why_lost:
            raise PeerLost(f"{self._instance_id}: {self._why_lost}")
        handle = LoopbackWriteHandle(room, self._source, self._inbox, self._submit)
        self._handles = [known for known in self._handles if known.state is WriteState.OPEN] + [handle]
        return handle

    def probe(self) -> list[ProbePoint]:
        if self._is_closed:
            raise Closed(f"the peer {self._instance_id} is closed")
        points = []
        for num_bytes in _PROBE_SIZES:
            there, here = bytearray(num_bytes), bytes(num_bytes)
            start = time.perf_counter()
            there[:] = here
            points += [ProbePoint(direction, num_bytes, num_bytes / (time.perf_counter() - start) / 1e9) for direction in ("write", "read")]
        return points

    def break_off(self, why: str, missing: str = "") -> None:
        self._why_lost, self._missing = why, missing
        self._fail_open(f"{self._instance_id}: {why}")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for handle in self._handles:
            handle.cancel()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while any(handle.state is WriteState.OPEN for handle in self._handles) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._fail_open(f"{self._instance_id}: closed before its writes could be flushed")
        self._inbox.dismiss_writer()

    def _fail_open(self, text: str) -> None:
        for handle in self._handles:
            if handle.fail(text):
                self._ended(handle)
