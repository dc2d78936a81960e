"""The way into one inbox, over UCX."""

from __future__ import annotations

from collections.abc import Callable

from baton.kvtransfer import _native
from baton.kvtransfer.base import Peer, ProbePoint
from baton.kvtransfer.checks import room_number
from baton.kvtransfer.errors import Closed, PeerLost, PeerUnreachable, UCXError
from baton.kvtransfer.invitation import Invitation
from baton.kvtransfer.ucx import footholds
from baton.kvtransfer.ucx.birthplace import Birthplace
from baton.kvtransfer.ucx.contexts import UcxContext
from baton.kvtransfer.ucx.sending import SendingSide
from baton.kvtransfer.ucx.write import UcxWriteHandle

_LOST = 2
_PROBE_SIZES = (64 << 10, 1 << 20, 64 << 20)
#: A probe of a larger size is begun only where what was measured says that it is over in this part of the time that it may take.
_PROBE_SHARE = 0.5


class UcxPeer(Peer):
    def __init__(
        self,
        link: _native.Link,
        invitation: Invitation,
        source_bytes: int,
        probe_timeout_s: float,
        side: SendingSide,
        context: UcxContext,
        birthplace: Birthplace,
        begin: Callable[[_native.Link, UcxPeer, int], UcxWriteHandle | None],
        forget: Callable[[], object],
    ) -> None:
        self.link = link
        self._invitation = invitation
        self._source_bytes = source_bytes
        self._probe_timeout_s = probe_timeout_s
        self._side = side
        self._context: UcxContext | None = context
        self._birthplace = birthplace
        self._begin = begin
        self._forget = forget
        self._is_closed = False
        self._footholds: tuple[footholds.Foothold, ...] = ()
        self._missing = ""

    def stand_on(self, found: tuple[footholds.Foothold, ...]) -> None:
        """What of this host the connection goes through, once it is there."""
        self._footholds = found

    @property
    def instance_id(self) -> str:
        return self._invitation.identity.instance_id

    @property
    def transport(self) -> str:
        return self.link.transports

    @property
    def is_lost(self) -> bool:
        return bool(self._missing) or self.link.state == _LOST

    @property
    def missing(self) -> str:
        return self._missing

    def check(self) -> bool:
        self._birthplace.require()
        if not self._missing and (gone := footholds.missing(self._footholds)):
            self._missing = f"{gone}, which it went through, is gone"
            self.link.lose(self._missing)
        return not self.is_lost

    @property
    def info(self) -> str:
        """UCX's own description of the endpoint, for a log."""
        return self.link.info

    def begin(self, room: int) -> UcxWriteHandle:
        self._birthplace.require()
        room = room_number(room)
        handle = self._begin(self.link, self, room) if self.check() else None
        if handle is None:
            if self.is_lost and not self._is_closed:
                raise PeerLost(f"{self.instance_id}: {self._missing or self.link.failure}")
            raise Closed(f"the peer {self.instance_id} is closed")
        return handle

    def wrap(self, write: _native.Write) -> UcxWriteHandle:
        invitation = self._invitation
        return UcxWriteHandle(
            write,
            self.instance_id,
            self._source_bytes,
            invitation.pool.num_bytes,
            invitation.num_doorbells,
            self._side.has_device,
            self._birthplace,
        )

    def probe(self) -> list[ProbePoint]:
        self._birthplace.require()
        context = self._context
        if context is None:
            raise Closed(f"the peer {self.instance_id} is closed")
        points: list[ProbePoint] = []
        timeout_ns = int(self._probe_timeout_s * 1e9)
        for num_bytes in (size for size in _PROBE_SIZES if size <= self._invitation.scratch.num_bytes):
            fastest = max((point.gigabytes_per_s for point in points), default=float("inf")) * 1e9
            if _moved_by_probe(num_bytes) > fastest * self._probe_timeout_s * _PROBE_SHARE:
                break  # a slow wire: what is known must do
            memory = self._side.probe_memory(num_bytes, context)
            for direction in ("write", "read"):
                try:
                    speed = self.link.probe(memory, num_bytes, direction == "write", timeout_ns)
                except UCXError as error:
                    raise PeerUnreachable(
                        f"{self.instance_id}: the probe ({direction}, {num_bytes} bytes, {self.transport}) failed after at most "
                        f"{self._probe_timeout_s} s (probe_timeout_s): {error.reason}"
                    ) from error
                points.append(ProbePoint(direction, num_bytes, speed))
        return points

    def close(self) -> None:
        if self._birthplace.is_elsewhere:
            return
        self._is_closed = True
        self.link.close()
        self._context = None  # it may be out of date, and this peer the last that holds it
        self._forget()


def _moved_by_probe(num_bytes: int) -> int:
    """Bytes of the puts of one probe, the uncounted first one too (native/probe.cpp)."""
    return num_bytes + max(64 << 20, 2 * num_bytes) if num_bytes >= 1 << 20 else 65 * num_bytes
