"""Which route a request takes: pure policies over what the fleet knows of each server's load, and of what its prefix cache holds."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from baton.gateway.held_blocks import HeldBlocks
from baton.gateway.prefix_index import PrefixIndex
from baton.wire.prefix import block_ids

#: Of one prompt: what is behind them does not count, and no request holds the event loop for more than about a millisecond.
MAX_PROMPT_BLOCKS = 1_024

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

    @property
    def blocks(self) -> HeldBlocks: ...


class Candidate(Protocol):
    """A way through the fleet: one plain server, or a prefill and a decode server."""

    @property
    def servers(self) -> Sequence[Loaded]: ...


C = TypeVar("C", bound=Candidate)

#: Least is best: the busier server's tokens in flight, then both servers' together, then how little room the fuller pool has.
Load = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Decision(Generic[C]):
    """reason: a bounded word, for counters. prefix_tokens: leading tokens of the prompt that the first server is thought to hold."""

    route: C
    reason: str
    prefix_tokens: int = 0


@dataclass(slots=True)
class Expectation:
    """What servers that tell what they hold are expected to hold because of one room, until it is over."""

    parts: list[tuple[HeldBlocks, Sequence[int]]] = field(default_factory=list)

    def over(self) -> None:
        """Idempotent."""
        for held, blocks in self.parts:
            held.done(blocks)
        self.parts.clear()


class Router:
    """Chooses among the routes that can take a request. Keeps a count, so that equal routes take turns."""

    def __init__(
        self, policy: RoutingPolicy = "least-load", *, balance: float = 1.5, rng: random.Random | None = None, prefix_key: bytes = b""
    ) -> None:
        """balance: prefix-aware keeps to a prefix while the server's load is at most that many times the mean of all, plus what the prefix
        saves (see `_stick`); at least 1. prefix_key: with which servers hash what they say that they hold."""
        self._policy = policy
        self._balance = balance
        self._prefix_key = prefix_key
        self._last: tuple[Sequence[int], str, int, Sequence[int]] | None = None
        self._rng = rng or random.Random()
        self._turns = itertools.count()
        self._index = PrefixIndex()
        #: (policy, reason, "split" | "plain") -> how many requests.
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        #: Prompt tokens of all requests, and those of them that were thought to be on the chosen server already.
        self.prompt_tokens = 0
        self.prefix_tokens = 0

    def choose(self, routes: Sequence[C], prompt: Sequence[int] = (), salt: str = "") -> Decision[C]:
        """Of `routes`, which must not be empty, the one for `prompt` (token ids) of the tenant `salt`; counted."""
        decision = self._decide(routes, prompt, salt)
        self.decisions[self._policy, decision.reason, "plain" if len(decision.route.servers) == 1 else "split"] += 1
        self.prompt_tokens += len(prompt)
        self.prefix_tokens += decision.prefix_tokens
        return decision

    def sent(self, servers: Sequence[Loaded], prompt: Sequence[int], salt: str = "") -> Expectation:
        """`prompt` goes to these, which may be fewer than the route has: their prefix caches will hold it."""
        expected = Expectation()
        if self._policy != "prefix-aware":
            return expected
        for server in servers:
            blocks = self._blocks(prompt, server.page_size, salt)
            if server.blocks.tells:
                server.blocks.expect(blocks)
                expected.parts.append((server.blocks, blocks))
            else:
                self._index.add(server.instance_id, blocks, max_blocks=server.total_pages)
        return expected

    def forget(self, instance_id: str) -> None:
        """That process is gone, and its prefix cache with it."""
        self._index.forget(instance_id)

    def held(self, server: Loaded, prompt: Sequence[int], salt: str) -> int:
        """Leading tokens of `prompt` that the server holds, as it says, or where it says nothing, as it was sent them."""
        blocks = self._blocks(prompt, server.page_size, salt)
        found = server.blocks.held(blocks) if server.blocks.tells else self._index.held(server.instance_id, blocks)
        return found * server.page_size

    def told(self, server: Loaded, prompt: Sequence[int], salt: str) -> int:
        """Leading tokens of `prompt` that the server says it holds; 0 where it says nothing, or is not asked."""
        return server.blocks.told(self._blocks(prompt, server.page_size, salt)) * server.page_size if server.blocks.tells else 0

    def _blocks(self, prompt: Sequence[int], block_size: int, salt: str) -> Sequence[int]:
        """Those of the last prompt are kept: all servers are asked about the same one."""
        last = self._last
        if last is not None and last[0] is prompt and last[1:3] == (salt, block_size):
            return last[3]
        blocks = block_ids(self._prefix_key, salt, prompt, block_size, MAX_PROMPT_BLOCKS) if block_size else ()
        self._last = (prompt, salt, block_size, blocks)
        return blocks

    def _decide(self, routes: Sequence[C], prompt: Sequence[int], salt: str) -> Decision[C]:
        turn = next(self._turns) % len(routes)
        if self._policy == "power-of-two" and len(routes) > 1:
            return Decision(min(self._rng.sample(routes, 2), key=load_of), "lighter_of_two")
        if self._policy == "round-robin" and len(routes) > 1:
            return Decision(routes[turn], "next")
        if self._policy != "prefix-aware" and len(routes) == 1:
            return Decision(routes[0], "only_route")
        servers = _servers_of(routes)
        in_turn = _weigh([*routes[turn:], *routes[:turn]], servers)
        if self._policy == "prefix-aware":
            held = {key: self.held(server, prompt, salt) for key, server in servers.items()}
            return self._stick(in_turn, held)
        return Decision(min(in_turn, key=_load)[1], "least_load")

    def _stick(self, routes: Sequence[tuple[Load, C]], held: Mapping[int, int]) -> Decision[C]:
        """The route whose first server holds the longest prefix (of equal ones the one whose decode server does: less is sent; then the
        lightest), unless it is overloaded: what it has in flight exceeds `balance` times the mean of all routes by more tokens than the prefix
        spares it.

        To wait behind `n` tokens more than elsewhere costs about what computing `n` tokens elsewhere costs: beyond that sticking does not pay.
        """

        def less_is_better(one: tuple[Load, C]) -> tuple[int, int, Load]:
            servers = one[1].servers
            return -held[id(servers[0])], -held[id(servers[-1])], one[0]

        load, longest = min(routes, key=less_is_better)
        saved, on_decode = held[id(longest.servers[0])], held[id(longest.servers[-1])]
        lightest = min(routes, key=_load)[1]
        mean = sum(one[0][0] for one in routes) / len(routes)
        if not saved and not on_decode:
            return Decision(lightest, "no_prefix")
        if len(routes) > 1 and load[0] > self._balance * mean + saved:
            return Decision(lightest, "prefix_overloaded", held[id(lightest.servers[0])])
        return Decision(longest, "prefix" if saved else "prefix_on_decode", saved)


def load_of(route: Candidate) -> Load:
    return _weigh([route], _servers_of([route]))[0][0]


def _servers_of(routes: Sequence[Candidate]) -> dict[int, Loaded]:
    """By identity: each is asked once, however many routes it is in."""
    return {id(server): server for route in routes for server in route.servers}


def _weigh(routes: Sequence[C], servers: Mapping[int, Loaded]) -> list[tuple[Load, C]]:
    tokens = {key: server.tokens_in_flight for key, server in servers.items()}
    pages = {key: server.free_pages for key, server in servers.items()}
    weighed = []
    for route in routes:
        first, last = id(route.servers[0]), id(route.servers[-1])
        if len(route.servers) == 1:
            load = (tokens[first], tokens[first], -pages[first])
        else:
            load = (max(tokens[first], tokens[last]), tokens[first] + tokens[last], -min(pages[first], pages[last]))
        weighed.append((load, route))
    return weighed


def _load(one: tuple[Load, object]) -> Load:
    return one[0]
