"""What gateways are told of a prefix cache is what the cache holds, however far behind they are."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.prefix_tree import PrefixTree
from baton.wire.prefix import block_ids
from baton.workerkit import prefix_ledger
from baton.workerkit.prefix_ledger import PrefixLedger, PrefixTeller

SIZE = 2


@pytest.fixture(autouse=True, scope="module")
def small_bounds() -> Iterator[None]:
    """Small enough that lists are told in parts, and that changes are forgotten before they are told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_ledger, "MAX_CHANGES", 12)
        patch.setattr(prefix_ledger, "MAX_BLOCKS_A_REPORT", 3)
        yield


class Gateway:
    """Applies what it is told, as the real one does."""

    def __init__(self, ledger: PrefixLedger, key: bytes) -> None:
        self.key, self.held, self.num_resets = key, set[int](), 0
        self._teller: PrefixTeller = ledger.teller(key)

    def read(self) -> bool:
        """One report; whether another one is due at once."""
        told = self._teller.take()
        if told is not None:
            assert len(told.stored) + len(told.evicted) <= prefix_ledger.MAX_BLOCKS_A_REPORT
            if told.reset:
                self.held.clear()
                self.num_resets += 1
            assert self.num_resets, "the first report says all"
            self.held.difference_update(told.evicted)
            self.held.update(told.stored)
        return self._teller.has_more

    def catch_up(self) -> set[int]:
        while self.read():
            pass
        return self.held


class Cache:
    """A tree that sequences come to and leave, and the names of all that can be found in it."""

    def __init__(self) -> None:
        self.tree = PrefixTree(SIZE)
        self._pages = itertools.count()
        self._prefixes: list[tuple[str, list[int]]] = []

    def put(self, salt: str, tokens: list[int]) -> None:
        node = self.tree.match(salt, tokens)
        known = self.tree.pages(node) if node is not None else []
        if node is not None:
            self.tree.pin(node)
        pages = [*known, *(next(self._pages) for _ in range(len(tokens) // SIZE - len(known)))]
        node, _ = self.tree.extend(salt, node, tokens, pages)
        if node is not None:
            self.tree.unpin(node)
        self._prefixes.append((salt, tokens))

    def names(self, key: bytes) -> set[int]:
        found: set[int] = set()
        for salt, tokens in self._prefixes:
            node = self.tree.match(salt, tokens)
            found.update(block_ids(key, salt, tokens, SIZE, node.depth if node is not None else 0))
        return found


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(["", "b"]), st.lists(st.integers(0, 1), max_size=12)),
        st.tuples(st.just("evict"), st.integers(0, 5), st.none()),
        st.tuples(st.just("read"), st.integers(0, 1), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(before=OPERATIONS, after=OPERATIONS)
def test_gateways_know_what_is_held_once_they_have_caught_up(before: list[Any], after: list[Any]) -> None:
    cache = Cache()
    ledger = PrefixLedger(cache.tree.watch)
    gateways: list[Gateway] = []
    for number, operations in enumerate((before, after)):
        for kind, first, second in operations:
            if kind == "put":
                cache.put(first, second)
            elif kind == "evict":
                cache.tree.evict(first)
            elif gateways:
                gateways[first % len(gateways)].read()
        gateways.append(Gateway(ledger, f"key {number}".encode()))  # the second one comes when much has happened
    for gateway in gateways:
        assert gateway.catch_up() == cache.names(gateway.key)
        assert not gateway.read()


def test_one_that_is_far_behind_is_told_everything_anew() -> None:
    cache, draw = Cache(), random.Random(1)
    ledger = PrefixLedger(cache.tree.watch)
    gateway = Gateway(ledger, b"key")
    gateway.catch_up()
    for _ in range(30):
        cache.put("", [draw.randrange(9) for _ in range(6)])
        cache.tree.evict(2)
    assert len(ledger._changes) < 2 * prefix_ledger.MAX_CHANGES
    assert gateway.catch_up() == cache.names(b"key")
    assert gateway.num_resets == 2


def test_nothing_is_written_down_before_somebody_asks() -> None:
    watched: list[object] = []
    ledger = PrefixLedger(watched.append)
    assert not watched
    ledger.teller(b"one")
    ledger.teller(b"other")
    assert watched == [ledger]


def test_a_cache_that_is_off_is_said_to_be_off() -> None:
    told = PrefixLedger(None).teller(b"key").take()
    assert told is not None
    assert (told.reset, told.off, list(told.stored)) == (True, True, [])


def test_tokens_are_told_as_the_tree_keeps_them() -> None:
    """The tree's keys are arrays of this machine's order."""
    ledger = PrefixLedger(lambda watcher: None)
    gateway = Gateway(ledger, b"key")
    ledger.stored(7, None, b"tenant", array("I", [1, 70_000]).tobytes())
    assert gateway.catch_up() == set(block_ids(b"key", "tenant", [1, 70_000], 2, 1))
