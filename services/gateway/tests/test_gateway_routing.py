"""Routing policies and the index of prefixes, as properties."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.held_blocks import HeldBlocks
from baton.gateway.prefix_index import PrefixIndex
from baton.gateway.routing import MAX_PROMPT_BLOCKS, Decision, Router, load_of
from baton.wire.prefix import block_ids
from baton.wire.v1 import worker_pb2

POLICIES = ["least-load", "power-of-two", "round-robin", "prefix-aware"]


@dataclass(eq=False)
class Server:
    instance_id: str
    tokens_in_flight: int = 0
    free_pages: int = 100
    page_size: int = 4
    total_pages: int = 1000
    blocks: HeldBlocks = field(default_factory=HeldBlocks)


@dataclass(eq=False)
class Way:
    servers: tuple[Server, ...]


def pairs(loads: list[tuple[int, ...]]) -> list[Way]:
    return [Way(tuple(Server(f"s{number}-{place}", load) for place, load in enumerate(both))) for number, both in enumerate(loads)]


some_loads = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)) | st.tuples(st.integers(0, 10_000)), min_size=1, max_size=8)
some_tokens = st.lists(st.integers(0, 2), max_size=40)


@pytest.mark.parametrize("policy", POLICIES)
@given(loads=some_loads, prompt=some_tokens)
def test_every_policy_takes_a_route_that_is_there_and_counts_it(policy: str, loads: list[tuple[int, ...]], prompt: list[int]) -> None:
    ways, router = pairs(loads), Router(policy)  # type: ignore[arg-type]
    decision = router.choose(ways, prompt)
    assert decision.route in ways
    topology = "plain" if len(decision.route.servers) == 1 else "split"
    assert router.decisions == {(policy, decision.reason, topology): 1}
    assert router.prompt_tokens == len(prompt)


@given(some_loads, st.integers(0, 1000))
def test_of_two_drawn_at_random_the_lighter_is_taken(loads: list[tuple[int, ...]], seed: int) -> None:
    """So the one route that is heavier than all others is never taken where there are others, and every other one may be."""
    ways = pairs(loads)
    heaviest = max(ways, key=load_of)
    router = Router("power-of-two", rng=random.Random(seed))
    taken = {id(router.choose(ways).route) for _ in range(40)}
    alone = sum(load_of(way) == load_of(heaviest) for way in ways) == 1
    assert not (alone and len(ways) > 1 and id(heaviest) in taken)


def test_power_of_two_spreads_what_least_load_would_send_to_one_server() -> None:
    """With reports that are a second old all gateways see the same lightest server; two choices do not run it over."""
    ways = pairs([(load,) for load in range(8)])
    router, least = Router("power-of-two", rng=random.Random(7)), Router("least-load")
    spread = Counter(router.choose(ways).route.servers[0].instance_id for _ in range(2000))
    assert {least.choose(ways).route.servers[0].instance_id for _ in range(100)} == {"s0-0"}
    assert spread["s0-0"] < 2000 * 0.35
    assert len(spread) == 7


@given(some_loads)
def test_round_robin_takes_each_once_in_a_round(loads: list[tuple[int, ...]]) -> None:
    ways, router = pairs(loads), Router("round-robin")
    assert {id(router.choose(ways).route) for _ in ways} == {id(way) for way in ways}


# --- prefix-aware


def send(router: Router, ways: list[Way], prompt: list[int]) -> Decision[Way]:
    """As the dispatcher does."""
    decision = router.choose(ways, prompt)
    router.sent(decision.route.servers, prompt)
    return decision


def test_a_prompt_goes_where_its_prefix_is() -> None:
    ways, router = pairs([(0, 0)] * 4), Router("prefix-aware")
    first = send(router, ways, list(range(40)))
    assert first.reason == "no_prefix"
    for number in range(8):
        again = send(router, ways, [*range(32), 1000 + number])
        assert again.route is first.route
        assert (again.reason, again.prefix_tokens) == ("prefix", 32)
    assert router.prefix_tokens == 8 * 32
    other = send(router, ways, [999, *range(39)])  # the same tokens one place on are another prefix
    assert other.reason == "no_prefix"


def test_of_two_prefixes_the_longer_one_counts() -> None:
    ways, router = pairs([(0,), (0,)]), Router("prefix-aware")
    short = send(router, [ways[0]], list(range(8))).route
    long = send(router, [ways[1]], list(range(20))).route
    decision = send(router, ways, list(range(40)))
    assert decision.route is long is not short
    assert decision.prefix_tokens == 20


def test_an_overloaded_server_is_left_and_found_again() -> None:
    """Left once it has more in flight than 1.5 times the mean and what the prefix spares: 1.5 * (L + 100) / 2 + 400 < L from L = 1,901 on."""
    ways, router = pairs([(0,), (100,)]), Router("prefix-aware", balance=1.5)
    prompt = list(range(400))
    assert send(router, ways, prompt).route is ways[0]
    ways[0].servers[0].tokens_in_flight = 1899
    assert send(router, ways, prompt).reason == "prefix"
    ways[0].servers[0].tokens_in_flight = 1901
    left = send(router, ways, prompt)
    assert left.route is ways[1]
    assert (left.reason, left.prefix_tokens) == ("prefix_overloaded", 0)
    assert send(router, ways, prompt).route is ways[1]  # which holds it too by now, and is lighter
    ways[0].servers[0].tokens_in_flight = 0
    assert send(router, ways, prompt).route is ways[0]


@given(some_loads, st.lists(st.tuples(some_tokens, some_loads), max_size=12), st.floats(1, 4))
def test_sticking_is_bounded_by_load(loads: list[tuple[int, ...]], later: list[tuple[list[int], list[tuple[int, ...]]]], balance: float) -> None:
    """Whatever was sent before: the route taken is the lightest, or exceeds `balance` times the mean by no more than it spares."""
    ways, router = pairs(loads), Router("prefix-aware", balance=balance)
    for prompt, new in later:
        for way, both in zip(ways, new, strict=False):
            for server, load in zip(way.servers, both, strict=False):
                server.tokens_in_flight = load
        decision = send(router, ways, prompt)
        mean = sum(load_of(way)[0] for way in ways) / len(ways)
        load = load_of(decision.route)
        assert load == min(map(load_of, ways)) or load[0] <= balance * mean + decision.prefix_tokens


def test_a_prompt_that_was_computed_elsewhere_is_not_thought_to_be_there() -> None:
    """Decode computed it itself: prefill never saw it."""
    ways, router = pairs([(0, 0), (0, 0)]), Router("prefix-aware")
    prompt = list(range(16))
    first = router.choose(ways, prompt).route
    router.sent(first.servers[1:], prompt)
    again = router.choose(ways, prompt)
    assert (again.route, again.reason, again.prefix_tokens) == (first, "prefix_on_decode", 0)


def test_a_process_that_is_gone_holds_nothing() -> None:
    ways, router = pairs([(0,), (0,)]), Router("prefix-aware")
    prompt = list(range(16))
    held = send(router, ways, prompt).route
    router.forget(held.servers[0].instance_id)
    assert send(router, ways, prompt).reason == "no_prefix"


# --- servers that say what they hold

KEY = b"drawn by the gateway"


def told(server: Server, *, stored: list[int] | None = None, evicted: list[int] | None = None, reset: bool = False, off: bool = False) -> None:
    """As a report of its session."""
    server.blocks.take(worker_pb2.PrefixBlocks(reset=reset, stored=ids(stored or []), evicted=ids(evicted or []), off=off))


def ids(prompt: list[int], salt: str = "") -> list[int]:
    return block_ids(KEY, salt, prompt, 4, MAX_PROMPT_BLOCKS)


def telling(loads: list[tuple[int, ...]]) -> tuple[list[Way], Router]:
    ways = pairs(loads)
    for way in ways:
        for server in way.servers:
            told(server, reset=True)
    return ways, Router("prefix-aware", prefix_key=KEY)


def test_what_a_server_says_counts_also_where_nothing_was_sent() -> None:
    """Another gateway sent it there, or an answer's pages are there that nobody sent."""
    ways, router = telling([(0, 0), (0, 0), (0, 0)])
    told(ways[2].servers[0], stored=list(range(32)))
    decision = router.choose(ways, [*range(32), 7])
    assert (decision.route, decision.reason, decision.prefix_tokens) == (ways[2], "prefix", 32)
    assert router.choose(ways, [*range(32), 7], "another tenant").reason == "no_prefix"


def test_the_decode_server_that_holds_the_answer_is_taken() -> None:
    prefills, decodes = [Server("p0"), Server("p1")], [Server("d0"), Server("d1")]
    ways = [Way((prefill, decode)) for prefill in prefills for decode in decodes]
    for server in (*prefills, *decodes):
        told(server, reset=True)
    router = Router("prefix-aware", prefix_key=KEY)
    told(prefills[1], stored=list(range(16)))
    told(decodes[0], stored=list(range(16)))
    told(decodes[1], stored=list(range(28)))
    assert router.choose(ways, list(range(40))).route is ways[3]


def test_a_room_on_its_way_is_expected_and_what_it_left_is_told() -> None:
    ways, router = telling([(0,), (0,)])
    prompt = list(range(16))
    first = router.choose(ways, prompt).route
    expected = router.sent(first.servers, prompt)
    assert router.choose(ways, prompt) == Decision(first, "prefix", 16)  # several prompts at once with one prefix go to one server
    expected.over()
    assert router.choose(ways, prompt).reason == "no_prefix"  # it failed, say: nothing of it stays
    expected.over()
    told(first.servers[0], stored=prompt)
    assert router.choose(ways, prompt) == Decision(first, "prefix", 16)


def test_what_was_evicted_is_not_expected() -> None:
    ways, router = telling([(0,), (0,)])
    prompt = list(range(16))
    first = router.choose(ways, prompt).route
    both = [router.sent(first.servers, prompt) for _ in range(2)]
    told(first.servers[0], stored=prompt)
    first.servers[0].blocks.take(worker_pb2.PrefixBlocks(evicted=ids(prompt)[2:]))
    assert router.choose(ways, prompt).prefix_tokens == 8
    for one in both:
        one.over()
    assert router.choose(ways, prompt).prefix_tokens == 8
    first.servers[0].blocks.take(worker_pb2.PrefixBlocks(evicted=ids(prompt)[:2]))
    assert router.choose(ways, prompt).reason == "no_prefix"


def test_a_list_that_is_told_anew_replaces_the_last_one() -> None:
    ways, router = telling([(0,), (0,)])
    told(ways[0].servers[0], stored=list(range(16)))
    told(ways[0].servers[0], stored=list(range(100, 108)), reset=True)
    assert router.choose(ways, list(range(16))).reason == "no_prefix"
    assert router.choose(ways, list(range(100, 116))).prefix_tokens == 8


def test_of_a_server_without_a_cache_nothing_is_expected() -> None:
    ways, router = telling([(0,), (0,)])
    for way in ways:
        told(way.servers[0], reset=True, off=True)
    prompt = list(range(16))
    router.sent(ways[0].servers, prompt)
    assert router.choose(ways, prompt).reason == "no_prefix"


def test_what_is_expected_was_not_told() -> None:
    """A prompt on its way may come too late for whoever relies on its pages."""
    ways, router = telling([(0,), (0,)])
    server, prompt = ways[0].servers[0], list(range(16))
    told(server, stored=prompt[:4])
    router.sent([server], prompt)
    assert (router.held(server, prompt, ""), router.told(server, prompt, "")) == (16, 4)
    silent = Server("silent")
    router.sent([silent], prompt)
    assert router.told(silent, prompt, "") == 0


def test_a_room_that_is_over_takes_nothing_from_one_that_came_behind_an_eviction() -> None:
    ways, router = telling([(0,)])
    server, prompt = ways[0].servers[0], list(range(8))
    first = router.sent([server], prompt)
    told(server, stored=prompt)
    told(server, evicted=prompt)  # both blocks: what the first room left is gone
    assert router.held(server, prompt, "") == 0
    second = router.sent([server], prompt)
    first.over()
    assert router.held(server, prompt, "") == 8
    second.over()
    assert router.held(server, prompt, "") == 0
    assert not server.blocks._expected
    assert not server.blocks._void


def test_more_than_the_bound_is_not_believed() -> None:
    held = HeldBlocks(max_blocks=3)
    prompt = ids(list(range(40)))
    held.take(worker_pb2.PrefixBlocks(reset=True, stored=prompt))
    assert (len(held), held.held(prompt)) == (3, 3)
    held.take(worker_pb2.PrefixBlocks(evicted=prompt[2:3]))
    assert held.held(prompt) == 2


# --- the index

prompts = st.lists(st.integers(0, 1), max_size=24)


def blocks_of(prompt: list[int], size: int) -> list[int]:
    return block_ids(b"", "", prompt, size, MAX_PROMPT_BLOCKS)


def common_blocks(one: list[int], other: list[int], size: int) -> int:
    same = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        same += 1
    return same // size * size


@given(st.lists(prompts, max_size=10), prompts, st.integers(1, 5))
def test_while_nothing_is_forgotten_the_index_knows_the_longest_common_prefix(sent: list[list[int]], asked: list[int], size: int) -> None:
    index = PrefixIndex()
    for prompt in sent:
        index.add("a", blocks_of(prompt, size), max_blocks=10_000)
    assert index.held("a", blocks_of(asked, size)) * size == max((common_blocks(prompt, asked, size) for prompt in sent), default=0)
    assert index.held("b", blocks_of(asked, size)) == 0


@given(st.lists(prompts, max_size=20), prompts, st.integers(1, 3), st.integers(0, 12), st.integers(1, 12))
def test_the_index_is_bounded_and_holds_prefixes_from_their_beginning(
    sent: list[list[int]], asked: list[int], size: int, pool: int, bound: int
) -> None:
    """The search halves, which is only right if no block is held whose beginning is not."""
    index = PrefixIndex(max_blocks=bound)
    for prompt in sent:
        index.add("a", blocks_of(prompt, size), max_blocks=pool)
        assert len(index) <= min(pool, bound)
    known, hashes = index._servers.get("a", {}), blocks_of(asked, size)
    found = [one in known for one in hashes]
    assert found == sorted(found, reverse=True)
    assert index.held("a", blocks_of(asked, size)) == sum(found)
    if sent and pool and len(sent[-1]) >= size:
        assert index.held("a", blocks_of(sent[-1], size)) == min(len(sent[-1]) // size, pool, bound)  # the youngest is there


def test_what_is_used_is_kept_and_what_is_not_goes_first() -> None:
    index = PrefixIndex()
    system, chat = list(range(100, 108)), list(range(200, 208))
    index.add("a", blocks_of(system, 4), max_blocks=4)
    index.add("a", blocks_of(chat, 4), max_blocks=4)
    index.add("a", blocks_of(system, 4), max_blocks=4)
    index.add("a", blocks_of([*system, 1, 2, 3, 4], 4), max_blocks=4)
    assert index.held("a", blocks_of(system, 4)) == 2
    assert index.held("a", blocks_of(chat, 4)) == 1
