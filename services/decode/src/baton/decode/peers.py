"""All prefill servers that this decode server knows: connected before the first request, let go when nobody names them any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.decode.link import PrefillLink
from baton.decode.peer import Doors, PrefillPeer
from baton.servicekit import get_logger
from baton.wire.v1 import worker_pb2

log = get_logger(__name__)

TICK_S = 0.2


class PeerSet:
    """`find` and `states` may be called from any thread; everything else on the event loop.

    linger_s: how long a peer that no gateway names any more stays connected: a gateway that restarts finds its pairs as they were.
    tick: called with time.monotonic() on this set's clock.
    """

    def __init__(self, *, linger_s: float) -> None:
        self._linger_s = linger_s
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, PrefillPeer] = {}
        self._named: frozenset[str] = frozenset()
        self._unnamed_since: dict[str, float] = {}
        self._doors: Doors | None = None
        self._closed = False
        self._on_change: Callable[[worker_pb2.PeerStates], None] = lambda states: None

    def on_change(self, tell: Callable[[worker_pb2.PeerStates], None]) -> None:
        """`tell` gets the state of all pairs whenever one of them changed."""
        self._on_change = tell

    def changed(self) -> None:
        self._on_change(worker_pb2.PeerStates(peers=self.states()))

    def states(self) -> list[worker_pb2.PeerState]:
        """Of every pair, as it is now. From any thread."""
        return [peer.state() for peer in list(self._peers.values())]

    def open(self, doors: Doors) -> None:
        """Before anything is sought: the importer and the set need one another."""
        self._doors = doors

    def find(self, address: str) -> PrefillLink | None:
        peer = self._peers.get(address)
        if peer is not None:
            return peer.link
        try:
            self._loop.call_soon_threadsafe(self._seek, address)
        except RuntimeError:  # the loop is closed: the process is ending
            return None
        return None

    def why_not(self, address: str) -> str:
        peer = self._peers.get(address)
        return "not sought yet" if peer is None else peer.problem or "connected"

    def obstacle(self) -> str:
        """What keeps this server from serving any pair: it cannot open an inbox, and no prefill server has one. Else ""."""
        if any(peer.link is not None for peer in self._peers.values()):
            return ""
        return next((peer.obstacle for peer in self._peers.values() if peer.obstacle), "")

    def name(self, addresses: frozenset[str]) -> None:
        """The whole set that gateways name now."""
        log.info("peers named", addresses=sorted(addresses))
        self._named = addresses
        for address in addresses:
            self._seek(address)

    async def run(self, tick: Callable[[float], None]) -> None:
        """The clock; until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            tick(now)
            for peer in list(self._peers.values()):
                peer.look(now)
            for address in self._stale(now):
                log.info("peer let go", address=address)
                await self._peers.pop(address).close()
                self.changed()

    async def close(self, timeout_s: float) -> None:
        """Ends all sessions and gives their fences `timeout_s`."""
        self._closed = True
        peers = list(self._peers.values())
        self._peers.clear()
        await asyncio.gather(*(peer.close() for peer in peers))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(peer.fenced() for peer in peers))
        except TimeoutError:
            log.warning("ending with sessions that are not fenced", sessions=sum(peer.num_unfenced for peer in peers))

    def _seek(self, address: str) -> None:
        if self._closed or address in self._peers:
            return
        assert self._doors is not None
        if address not in self._named:
            log.warning("prefill server sought for a room before any gateway named it", address=address)
        self._peers[address] = PrefillPeer(address, self._doors)
        self.changed()

    def _stale(self, now: float) -> list[str]:
        """Peers that nobody named for a while and that hold no lease."""
        assert self._doors is not None
        stale = []
        for address, peer in self._peers.items():
            if address in self._named or (peer.link is not None and self._doors.leases.has_leases(peer.link)):
                self._unnamed_since.pop(address, None)
            elif now - self._unnamed_since.setdefault(address, now) >= self._linger_s:
                del self._unnamed_since[address]
                stale.append(address)
        return stale
