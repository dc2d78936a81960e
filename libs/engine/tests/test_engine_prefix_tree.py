"""The prefix tree against a twin that keeps every prefix in a flat table: it finds, holds, evicts and drops the same."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.prefix_tree import PrefixTree

SIZE = 2
Prefix = tuple[str, tuple[int, ...]]


@dataclass
class Holder:
    """What one sequence of the twin holds: the prefix up to which, and the pages of it."""

    salt: str
    tokens: list[int]
    prefix: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    gone: bool = False


class FlatTable:
    """Every prefix of whole pages with its page and when it was last let go. Everything is found by looking at everything."""

    def __init__(self) -> None:
        self.entries: dict[Prefix, tuple[int, int]] = {}
        self.holders: list[Holder] = []
        self.clock = 0

    def match(self, salt: str, tokens: list[int]) -> list[int]:
        pages = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            entry = self.entries.get((salt, tuple(tokens[:end])))
            if entry is None:
                break
            pages.append(entry[0])
        return pages

    def is_held(self, at: Prefix) -> bool:
        return any(not each.gone and each.salt == at[0] and each.prefix[: len(at[1])] == at[1] for each in self.holders)

    def evictable(self) -> list[Prefix]:
        return [at for at in self.entries if not self.is_held(at)]

    def hold(self, salt: str, tokens: list[int]) -> Holder:
        pages = self.match(salt, tokens)
        holder = Holder(salt, tokens, tuple(tokens[: SIZE * len(pages)]), pages)
        if pages:
            self.holders.append(holder)
        return holder

    def extend(self, holder: Holder, pages: list[int]) -> int:
        if holder.gone:
            return 0
        taken = 0
        for index, page in enumerate(pages):
            at = (holder.salt, tuple(holder.tokens[: SIZE * (index + 1)]))
            if at not in self.entries:
                self.entries[at] = (page, 0)
                taken += 1
        reached = max(len(holder.prefix), SIZE * len(pages))
        holder.prefix = tuple(holder.tokens[:reached])
        holder.pages = self.match(holder.salt, list(holder.prefix))
        if reached and not any(each is holder for each in self.holders):
            self.holders.append(holder)
        return taken

    def let_go(self, holder: Holder) -> list[int]:
        self.clock += 1
        self.holders = [each for each in self.holders if each is not holder]
        if holder.gone:
            others = {page for each in self.holders if each.gone for page in each.pages}
            return [page for page in holder.pages if page not in others]
        for end in range(SIZE, len(holder.prefix) + 1, SIZE):
            at = (holder.salt, holder.prefix[:end])
            self.entries[at] = (self.entries[at][0], self.clock)
        return []

    def evict(self, count: int) -> list[int]:
        evicted = []
        while len(evicted) < count:
            parents = {(salt, tokens[:-SIZE]) for salt, tokens in self.entries}
            leaves = [at for at in self.evictable() if at not in parents]
            if not leaves:
                break
            oldest = min(leaves, key=lambda at: self.entries[at][1])
            evicted.append(self.entries.pop(oldest)[0])
        return evicted

    def drop(self, holder: Holder) -> list[int]:
        if holder.gone:
            return []
        family = [at for at in self.entries if at[0] == holder.salt and at[1][:SIZE] == holder.prefix[:SIZE]]
        freed = [self.entries[at][0] for at in family if not self.is_held(at)]
        for at in family:
            del self.entries[at]
        for each in self.holders:
            each.gone = each.gone or (each.salt == holder.salt and each.prefix[:SIZE] == holder.prefix[:SIZE])
        return freed


TOKENS = st.lists(st.integers(0, 1), max_size=9)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(["", "b"]), TOKENS),
        st.tuples(st.just("keep"), st.integers(0, 9), st.integers(0, 5)),
        st.tuples(st.just("go"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("evict"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


class Mirror:
    """Makes the tree again out of what it is told. Fails where a page comes before, or goes after, the one that it is behind."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int | None, bytes, Prefix]] = {}

    def stored(self, page: int, before: int | None, salt: bytes, tokens: bytes) -> None:
        assert page not in self.pages
        assert before is None or self.pages[before][1] == salt
        self.pages[page] = (before, salt, tuple(array("I", tokens)))

    def gone(self, page: int) -> None:
        del self.pages[page]
        assert page not in {before for before, _, _ in self.pages.values()}

    def entries(self) -> dict[tuple[str, Prefix], int]:
        return {(salt.decode(), self._prefix(page)): page for page, (_, salt, _) in self.pages.items()}

    def _prefix(self, page: int | None) -> Prefix:
        return () if page is None else self._prefix(self.pages[page][0]) + self.pages[page][2]


@settings(max_examples=200, deadline=None)
@given(operations=OPERATIONS, probe=TOKENS)
def test_the_tree_does_what_a_flat_table_does(operations, probe):
    tree, table, mirror = PrefixTree(SIZE), FlatTable(), Mirror()
    tree.watch(mirror)
    fresh = itertools.count()
    open_ones: list[tuple[Holder, list]] = []
    for kind, first, second in operations:
        if kind == "come":
            node = tree.match(first, second)
            holder = table.hold(first, second)
            assert ([] if node is None else tree.pages(node)) == holder.pages
            if node is not None:
                tree.pin(node)
            open_ones.append((holder, [node]))
        elif kind == "evict":
            assert tree.evict(first) == table.evict(first)
        elif open_ones:
            index = first % len(open_ones)
            holder, node = open_ones[index]
            if kind == "keep":
                count = min(second, len(holder.tokens) // SIZE)
                pages = [*holder.pages[:count], *(next(fresh) for _ in range(count - len(holder.pages)))]
                node[0], taken = tree.extend(holder.salt, node[0], holder.tokens, pages)
                assert taken == table.extend(holder, pages)
            elif kind == "drop" and node[0] is not None:
                assert sorted(tree.drop(node[0])) == sorted(table.drop(holder))
            elif kind == "go":
                del open_ones[index]
                freed = [] if node[0] is None else tree.unpin(node[0])
                assert sorted(freed) == sorted(table.let_go(holder) if node[0] is not None else [])
        assert tree.num_evictable == len(table.evictable())
        orphans = {page for holder in table.holders if holder.gone for page in holder.pages}
        assert len(tree) == len(table.entries) + len(orphans)
        for salt in ("", "b"):
            node = tree.match(salt, probe)
            assert ([] if node is None else tree.pages(node)) == table.match(salt, probe)
        assert mirror.entries() == {at: page for at, (page, _) in table.entries.items()}
    late = Mirror()
    tree.watch(late)
    assert late.pages == mirror.pages
    for _, node in open_ones:
        if node[0] is not None:
            tree.unpin(node[0])
    assert len(tree.evict(10_000)) == len(table.entries)
    assert not late.pages
    assert len(tree) == tree.num_evictable == 0


def put(tree: PrefixTree, tokens: list[int], pages: list[int], salt: str = "") -> None:
    """Pages of a sequence that came, was computed and went."""
    node, _ = tree.extend(salt, None, tokens, pages)
    tree.unpin(node)


def test_the_leaf_that_was_used_least_recently_goes_first_and_what_is_shared_stays():
    tree = PrefixTree(2)
    put(tree, [1, 1, 2, 2], [10, 11])
    put(tree, [1, 1, 3, 3], [99, 12])  # its first page is there already: page 99 stays its own
    assert 99 not in tree
    node = tree.match("", [1, 1, 2, 2, 5])
    tree.pin(node)
    tree.unpin(node)
    assert tree.evict(1) == [12]
    assert tree.evict(5) == [11, 10]


def test_what_is_held_is_not_evicted():
    tree = PrefixTree(2)
    put(tree, [1, 1, 2, 2], [10, 11])
    node = tree.match("", [1, 1, 9])
    tree.pin(node)
    assert tree.num_evictable == 1
    assert tree.evict(5) == [11]
    assert tree.evict(5) == []
    tree.unpin(node)
    assert tree.evict(5) == [10]


def test_another_salt_finds_nothing():
    tree = PrefixTree(2)
    put(tree, [1, 1], [10], salt="a")
    assert tree.match("", [1, 1]) is None
    assert tree.match("b", [1, 1]) is None
    assert tree.pages(tree.match("a", [1, 1])) == [10]


def test_a_page_that_is_let_go_twice_is_an_error():
    tree = PrefixTree(2)
    put(tree, [1, 1], [10])
    with pytest.raises(AssertionError, match="page 10"):
        tree.unpin(tree.match("", [1, 1]))


def test_stale_entries_of_leaves_do_not_pile_up():
    tree = PrefixTree(1)
    put(tree, [1], [0])
    for _ in range(5000):
        node = tree.match("", [1])
        tree.pin(node)
        tree.unpin(node)
    assert len(tree._leaves) < 100
