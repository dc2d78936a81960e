"""Which route a request takes: pure policies over what the fleet knows of each server's load, and of what it may hold in its prefix cache."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from baton.gateway.prefix_index import PrefixIndex

RoutingPolicy = Literal["least-load", "power-of-two", "round-robin", "prefix-aware"]


class Loaded(Protocol):
    """What a policy may look at."""

    @property
    def instance_id(self) -> str: ...

    @property
    def tokens_in_flight(self) -> int: ...

    @property
    def free_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def total_pages(self) -> int: ...


class Candidate(Protocol):
    """A way through the fleet: one plain server, or a prefill and a decode server."""

    @property
    def servers(self) -> Sequence[Loaded]: ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Decision(Generic[C]):
    """reason: a bounded word, for counters. prefix_tokens: leading tokens of the prompt that the first server is thought to hold."""

    route: C
    reason: str
    prefix_tokens: int = 0


class Router:
    """Chooses among the routes that can take a request. Keeps a count, so that equal routes take turns."""

    def __init__(self, policy: RoutingPolicy = "least-load", *, balance: float = 1.5, rng: random.Random | None = None) -> None:
        """balance: prefix-aware keeps to a prefix while the server's load is at most that many times the mean of all, plus what the prefix
        saves (see `_stick`); at least 1."""
        self._policy = policy
        self._balance = balance
        self._rng = rng or random.Random()
        self._turns = itertools.count()
        self._index = PrefixIndex()
        #: (policy, reason, "split" | "plain") -> how many requests.
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        #: Prompt tokens of all requests, and those of them that were thought to be on the chosen server already.
        self.prompt_tokens = 0
        self.prefix_tokens = 0

    def choose(self, routes: Sequence[C], prompt: Sequence[int] = ()) -> Decision[C]:
        """Of `routes`, which must not be empty, the one for `prompt` (token ids); counted."""
        decision = self._decide(routes, prompt)
        self.decisions[self._policy, decision.reason, "plain" if len(decision.route.servers) == 1 else "split"] += 1
        self.prompt_tokens += len(prompt)
        self.prefix_tokens += decision.prefix_tokens
        return decision

    def sent(self, servers: Sequence[Loaded], prompt: Sequence[int]) -> None:
        """`prompt` goes to these, which may be fewer than the route has: their prefix caches will hold it."""
        if self._policy != "prefix-aware":
            return
        for server in servers:
            self._index.add(server.instance_id, prompt, server.page_size, max_blocks=server.total_pages)

    def forget(self, instance_id: str) -> None:
        """That process is gone, and its prefix cache with it."""
        self._index.forget(instance_id)

    def _decide(self, routes: Sequence[C], prompt: Sequence[int]) -> Decision[C]:
        turn = next(self._turns) % len(routes)
        in_turn = [*routes[turn:], *routes[:turn]]
        if self._policy == "prefix-aware":
            return self._stick(in_turn, prompt)
        if len(routes) == 1:
            return Decision(routes[0], "only_route")
        if self._policy == "round-robin":
            return Decision(in_turn[0], "next")
        if self._policy == "power-of-two":
            return Decision(min(self._rng.sample(in_turn, 2), key=load_of), "lighter_of_two")
        return Decision(min(in_turn, key=load_of), "least_load")

    def _stick(self, routes: Sequence[C], prompt: Sequence[int]) -> Decision[C]:
        """The route whose first server holds the longest prefix (of equal ones the one whose decode server does: less is sent; then the
        lightest), unless it is overloaded: what it has in flight exceeds `balance` times the mean of all routes by more tokens than the prefix
        spares it.

        To wait behind `n` tokens more than elsewhere costs about what computing `n` tokens elsewhere costs: beyond that sticking does not pay.
        """
        servers = {server.instance_id: server for route in routes for server in route.servers}
        on_server = {name: self._index.held(name, prompt, server.page_size) for name, server in servers.items()}
        held = {id(route): tuple(on_server[server.instance_id] for server in route.servers) for route in routes}
        longest = min(routes, key=lambda route: (tuple(-tokens for tokens in held[id(route)]), load_of(route)))
        lightest = min(routes, key=load_of)
        saved = held[id(longest)][0]
        if not any(held[id(longest)]):
            chosen, reason = lightest, "no_prefix"
        elif len(routes) > 1 and load_of(longest)[0] > self._balance * _mean_load(routes) + saved:
            chosen, reason = lightest, "prefix_overloaded"
        else:
            chosen, reason = longest, "prefix" if saved else "prefix_on_decode"
        return Decision(chosen, reason, held[id(chosen)][0])


def load_of(route: Candidate) -> tuple[int, int, int]:
    """Least is best: the busier server's tokens in flight, then both servers' together, then how little room the fuller pool has."""
    tokens = [server.tokens_in_flight for server in route.servers]
    return max(tokens), sum(tokens), -min(server.free_pages for server in route.servers)


def _mean_load(routes: Sequence[Candidate]) -> float:
    return sum(load_of(route)[0] for route in routes) / len(routes)
