"""Opens the ways from our ranks into a decode server's, and measures them. Everything here waits for the peer."""

from __future__ import annotations

from collections.abc import Sequence

from baton.kvtransfer import Peer, ProbePoint, RankMemory, Route, TransferError
from baton.prefill.link import Way


def open_ways(routes: Sequence[Route], ranks: Sequence[RankMemory], invitations: Sequence[bytes]) -> list[Way]:
    """One for each route. invitations: of each destination rank. Raises TransferError, and then none is left open."""
    ways: list[Way] = []
    try:
        for route in routes:
            here = ranks[route.source_rank]
            ways.append(Way(route, here.agent.connect(invitations[route.destination_rank], here.region)))
    except TransferError:
        close_ways(ways)
        raise
    return ways


def renewed(ways: Sequence[Way], fresh: Sequence[Way]) -> list[Way]:
    """`ways` with each of `fresh` in the place of the one of its route."""
    by_route = {way.route: way for way in fresh}
    return [by_route.get(way.route, way) for way in ways]


def close_ways(ways: Sequence[Way]) -> None:
    """Returns when nothing goes over any of them any more. Idempotent."""
    for way in ways:
        way.peer.close()


def probe_ways(ways: Sequence[Way]) -> list[ProbePoint]:
    """What the slowest of them reached for each size, writing. One after another: they share what they go over. Raises TransferError."""
    slowest: dict[int, ProbePoint] = {}
    for way in ways:
        for point in way.peer.probe():
            if point.direction != "write":
                continue
            best = slowest.get(point.num_bytes)
            if best is None or point.gigabytes_per_s < best.gigabytes_per_s:
                slowest[point.num_bytes] = point
    return list(slowest.values())


def has_peer(ways: Sequence[Way], peer: Peer) -> bool:
    return any(way.peer is peer for way in ways)
