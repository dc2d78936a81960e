"""The gateways that are attached to a worker, and the peers that they named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from baton.wire.v1 import worker_pb2
from baton.workerkit.session import GatewaySession


class Gateways:
    """Lives on one event loop. Iterates over the sessions, in the order in which they came."""

    def __init__(self, on_peers: Callable[[frozenset[str]], None]) -> None:
        """on_peers: called with the union of what all of them named, whenever it may have changed."""
        self._on_peers = on_peers
        self._named: dict[GatewaySession, frozenset[str]] = {}
        self._pairs: worker_pb2.PeerStates | None = None

    def __iter__(self) -> Iterator[GatewaySession]:
        return iter(self._named)

    def add(self, session: GatewaySession) -> None:
        """Told how the pairs are, as far as that is known."""
        self._named[session] = frozenset()
        if self._pairs is not None:
            session.peers(self._pairs)

    def remove(self, session: GatewaySession) -> None:
        """What it named is forgotten. Idempotent."""
        if self._named.pop(session, frozenset()):
            self._tell()

    def name_peers(self, session: GatewaySession, addresses: Sequence[str]) -> None:
        self._named[session] = frozenset(addresses)
        self._tell()

    def tell_pairs(self, states: worker_pb2.PeerStates) -> None:
        """To all that are attached now and to those that will be."""
        self._pairs = states
        for session in self:
            session.peers(states)

    def newest_address(self) -> str:
        """Where clients should go: what the gateway that attached last said; empty when none is attached."""
        return next((session.gateway_address for session in reversed(self._named)), "")

    def end(self) -> None:
        """Ends every stream after its last report."""
        for session in self:
            session.end()

    def _tell(self) -> None:
        self._on_peers(frozenset().union(*self._named.values()))
