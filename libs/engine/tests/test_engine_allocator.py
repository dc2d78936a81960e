"""The page allocator: no page twice, few extents, growth in place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.allocator import PageAllocator
from baton.engine.page_table import PageTable
from baton.engine.types import Extent


def pages_of(table: PageTable) -> list[int]:
    return [page for extent in table.extents for page in range(extent.first, extent.end)]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(1, 12), st.integers(0, 6)),
        st.tuples(st.just("grow"), st.integers(1, 5), st.integers(0, 6)),
        st.tuples(st.just("free"), st.integers(0, 50), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(num_pages=st.integers(1, 40), operations=OPERATIONS, pick=st.randoms(use_true_random=False))
def test_no_page_has_two_owners_and_none_is_lost(num_pages, operations, pick):
    allocator = PageAllocator(num_pages)
    tables: list[PageTable] = []
    for kind, count, headroom in operations:
        before = allocator.num_free
        runs = [length for _, length in allocator.free_runs()]
        if kind == "free":
            if tables:
                allocator.free(tables.pop(count % len(tables)))
        else:
            table = PageTable() if kind == "new" or not tables else pick.choice(tables)
            if not any(table is known for known in tables):
                tables.append(table)
            extents = len(table.extents)
            granted = allocator.allocate(table, count, headroom)
            assert granted is (count <= before)
            assert allocator.num_free == before - (count if granted else 0)
            if granted and not extents and max(runs) >= count:
                assert len(table.extents) == 1, "a run long enough was free"
        held = [page for table in tables for page in pages_of(table)]
        free = [page for first, length in allocator.free_runs() for page in range(first, first + length)]
        assert sorted(held + free) == list(range(num_pages))
        assert all(table.num_pages == len(pages_of(table)) for table in tables)
    for table in tables:
        allocator.free(table)
    assert allocator.free_runs() == [(0, num_pages)]


def test_a_sequence_grows_in_place_while_the_next_pages_are_free():
    allocator = PageAllocator(16)
    table = PageTable()
    assert allocator.allocate(table, 3)
    for _ in range(5):
        assert allocator.allocate(table, 2)
    assert table.extents == [Extent(0, 13)]


def test_headroom_keeps_neighbours_away_while_there_is_room_elsewhere():
    allocator = PageAllocator(64)
    tables = [PageTable() for _ in range(4)]
    for table in tables:
        assert allocator.allocate(table, 4, headroom=12)
    for _ in range(12):
        for table in tables:
            assert allocator.allocate(table, 1, headroom=4)
    assert [len(table.extents) for table in tables] == [1, 1, 1, 1]
    assert allocator.num_free == 0


def test_claimed_pages_are_used_when_nothing_else_is_left():
    allocator = PageAllocator(10)
    first, second = PageTable(), PageTable()
    assert allocator.allocate(first, 2, headroom=8)
    assert allocator.allocate(second, 8)
    assert allocator.num_free == 0
    assert len(second.extents) == 1


def test_a_scattered_pool_gives_the_largest_runs_first():
    allocator = PageAllocator(12)
    tables = [PageTable() for _ in range(6)]
    for table in tables:
        assert allocator.allocate(table, 2)
    for table in (tables[1], tables[3], tables[4]):
        allocator.free(table)
    wanted = PageTable()
    assert allocator.allocate(wanted, 5)
    assert wanted.extents == [Extent(6, 4), Extent(2, 1)]


def test_a_second_free_of_the_same_pages_is_caught():
    allocator = PageAllocator(8)
    table, forged = PageTable(), PageTable()
    assert allocator.allocate(table, 4)
    forged.append(Extent(0, 4))
    allocator.free(table)
    with pytest.raises(AssertionError, match="already free"):
        allocator.free(forged)


def test_runs_of_tokens_follow_the_extents():
    table = PageTable()
    table.append(Extent(4, 2))
    table.append(Extent(0, 1))
    table.append(Extent(9, 3))
    assert list(table.runs(0, 24, 4)) == [(16, 8), (0, 4), (36, 12)]
    assert list(table.runs(6, 5, 4)) == [(22, 2), (0, 3)]
    assert list(table.runs(13, 2, 4)) == [(37, 2)]
    with pytest.raises(AssertionError, match="beyond"):
        list(table.runs(20, 5, 4))
