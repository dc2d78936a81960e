"""Which route a request takes: pure policies over what the fleet knows of each server's load."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

RoutingPolicy = Literal["least-load", "round-robin"]


class Loaded(Protocol):
    """What a policy may look at."""

    @property
    def tokens_in_flight(self) -> int: ...

    @property
    def free_pages(self) -> int: ...


class Candidate(Protocol):
    """A way through the fleet: one plain server, or a prefill and a decode server."""

    @property
    def servers(self) -> Sequence[Loaded]: ...


C = TypeVar("C", bound=Candidate)


class Router:
    """Chooses among the routes that can take a request. Keeps a count, so that equal routes take turns."""

    def __init__(self, policy: RoutingPolicy = "least-load") -> None:
        self._policy = policy
        self._turns = itertools.count()

    def choose(self, routes: Sequence[C]) -> C:
        """`routes` must not be empty."""
        turn = next(self._turns) % len(routes)
        in_turn = [*routes[turn:], *routes[:turn]]
        return in_turn[0] if self._policy == "round-robin" else min(in_turn, key=load_of)


def load_of(route: Candidate) -> tuple[int, int, int]:
    """Least is best: the busier server's tokens in flight, then both servers' together, then how little room the fuller pool has."""
    tokens = [server.tokens_in_flight for server in route.servers]
    return max(tokens), sum(tokens), -min(server.free_pages for server in route.servers)
