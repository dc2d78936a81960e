"""Spans against the plain definition, on awkward shapes."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from baton.kvtransfer import InvalidArgument, merge, page_ids, spans_for
from baton.kvtransfer.spans import check


@dataclass(frozen=True)
class Layout:
    page_bytes: int
    num_pages: int

    @property
    def plane_bytes(self) -> int:
        return self.page_bytes * self.num_pages


def copy(spans: np.ndarray, source: bytes, destination: bytearray) -> None:
    for from_, to, length in spans.tolist():
        destination[to : to + length] = source[from_ : from_ + length]


def permutations(num_pages: int) -> st.SearchStrategy[list[int]]:
    return st.permutations(range(num_pages)).map(list)


@given(permutations(12), permutations(9), st.integers(0, 2), st.integers(0, 9), st.integers(0, 9), st.sampled_from([1, 3, 64]))
def test_spans_copy_exactly_the_pages(from_pages: list[int], to_pages: list[int], layer: int, first: int, count: int, page_bytes: int) -> None:
    count = min(count, 9 - first)
    here, there = Layout(page_bytes, 12), Layout(page_bytes, 9)
    source = np.random.default_rng(1).integers(1, 256, 6 * here.plane_bytes, dtype=np.uint8).tobytes()
    got, want = bytearray(6 * there.plane_bytes), bytearray(6 * there.plane_bytes)
    spans = spans_for(here, there, layer, from_pages, to_pages, first, count)
    copy(spans, source, got)
    for plane in (2 * layer, 2 * layer + 1):
        for from_, to in zip(from_pages[first : first + count], to_pages[first : first + count], strict=True):
            at, dst = plane * here.plane_bytes + from_ * page_bytes, plane * there.plane_bytes + to * page_bytes
            want[dst : dst + page_bytes] = source[at : at + page_bytes]
    assert got == want


def test_a_run_on_both_sides_is_one_span_for_keys_and_one_for_values() -> None:
    layout = Layout(100, 50)
    assert spans_for(layout, layout, 1, [5, 6, 7, 9], [20, 21, 22, 23]).tolist() == [
        [10_500, 12_000, 300],
        [10_900, 12_300, 100],
        [15_500, 17_000, 300],
        [15_900, 17_300, 100],
    ]


def test_page_ids_of_extents() -> None:
    assert page_ids([(3, 2), (10, 1), (0, 0)]).tolist() == [3, 4, 10]
    assert page_ids([]).tolist() == []


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 4), (3, 1), (0, -1)])
def test_pages_that_are_not_there_are_refused(first: int, count: int) -> None:
    layout = Layout(10, 10)
    with pytest.raises(InvalidArgument, match=r"only 3 are known"):
        spans_for(layout, layout, 0, [1, 2, 3], [1, 2, 3, 4], first, count)


def test_pages_of_two_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="10 here, 20 at the destination"):
        spans_for(Layout(10, 10), Layout(20, 10), 0, [1], [1])


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 4)), max_size=20)


@given(spans)
def test_merging_copies_the_same(rows: list[tuple[int, int, int]]) -> None:
    array = np.array(rows, dtype=np.int64).reshape(-1, 3)
    source = bytes(range(1, 65))
    once, twice = bytearray(64), bytearray(64)
    merged = merge(array)
    copy(array, source, once)
    copy(merged, source, twice)
    assert once == twice
    joined = [left for left, right in zip(merged[:-1].tolist(), merged[1:].tolist(), strict=True) if [n + left[2] for n in left[:2]] == right[:2]]
    assert joined == []


def test_check_names_the_first_bad_row() -> None:
    with pytest.raises(InvalidArgument, match=r"spans\[1\] = \[0, 8, 3\]"):
        check(np.array([[0, 0, 10], [0, 8, 3], [-1, 0, 1]]), 10, 10)
