"""Routes between unequal degrees: every head of every page arrives once, at its place, and nothing else is touched."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from baton.kvtransfer import AgentConfig, InvalidArgument, digest, open_agent, open_ranks, route_spans, routes, routes_into
from baton.kvtransfer.routes import own_heads

HEAD_BYTES = 6
HEADS = 12
DIVISORS = [1, 2, 3, 4, 6, 12]
NUM_LAYERS = 2


@dataclass(frozen=True)
class RankPool:
    num_kv_heads: int
    page_size: int
    num_pages: int

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.num_kv_heads * HEAD_BYTES

    @property
    def plane_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def array(self, memory: np.ndarray) -> np.ndarray:
        """[planes, pages, tokens, heads, bytes]."""
        return memory.reshape(2 * NUM_LAYERS, self.num_pages, self.page_size, self.num_kv_heads, HEAD_BYTES)

    def empty(self) -> np.ndarray:
        return np.zeros(2 * NUM_LAYERS * self.plane_bytes, dtype=np.uint8)


degrees = st.sampled_from(DIVISORS)


@given(degrees, degrees, st.permutations(range(8)), st.permutations(range(7)), st.integers(0, 5), st.integers(1, 5), st.sampled_from([1, 3, 4]))
def test_every_head_of_every_page_arrives_once_and_nothing_else(
    source_degree: int, destination_degree: int, from_pages: list[int], to_pages: list[int], first: int, count: int, page_size: int
) -> None:
    count = min(count, 7 - first)
    here, there = RankPool(HEADS // source_degree, page_size, 8), RankPool(HEADS // destination_degree, page_size, 7)
    model = np.random.default_rng(1).integers(1, 256, (2 * NUM_LAYERS, 8, page_size, HEADS, HEAD_BYTES), dtype=np.uint8)
    sources = [
        np.ascontiguousarray(model[..., rank * here.num_kv_heads : (rank + 1) * here.num_kv_heads, :]).reshape(-1) for rank in range(source_degree)
    ]
    written = [there.empty() for _ in range(destination_degree)]
    num_bytes = 0
    every = routes(HEADS, source_degree, destination_degree)
    for route in every:
        for layer in range(NUM_LAYERS):
            spans = route_spans(route, here, there, layer, from_pages, to_pages, first, count)
            for begin, end, length in spans.tolist():
                written[route.destination_rank][end : end + length] += sources[route.source_rank][begin : begin + length]
            num_bytes += int(spans[:, 2].sum())
            if source_degree != destination_degree:
                assert len(spans) == 2 * count * page_size
    # What was written twice would be a sum; what is missing, zero.
    want = np.zeros((2 * NUM_LAYERS, 7, page_size, HEADS, HEAD_BYTES), dtype=np.uint8)
    want[:, to_pages[first : first + count]] = model[:, from_pages[first : first + count]]
    got = np.concatenate([there.array(memory) for memory in written], axis=3)
    assert np.array_equal(got, want)
    assert num_bytes == 2 * NUM_LAYERS * count * page_size * HEADS * HEAD_BYTES


@given(degrees, degrees)
def test_both_sides_number_routes_alike(source_degree: int, destination_degree: int) -> None:
    every = routes(HEADS, source_degree, destination_degree)
    assert len({(route.source_rank, route.destination_rank) for route in every}) == len(every)
    assert sum(route.num_heads for route in every) == HEADS
    numbers = [number for rank in range(destination_degree) for number in routes_into(every, rank)]
    assert numbers == list(range(len(every)))


def test_equal_degrees_move_runs_of_pages() -> None:
    pool = RankPool(6, 4, 50)
    (first, second) = routes(HEADS, 2, 2)
    assert (first.source_rank, first.destination_rank, second.source_rank, second.destination_rank) == (0, 0, 1, 1)
    assert route_spans(second, pool, pool, 0, [5, 6, 7, 9], [20, 21, 22, 23])[:, 2].tolist() == [3 * pool.page_bytes, pool.page_bytes] * 2


def test_three_ranks_into_two_split_the_middle_one() -> None:
    found = [(r.source_rank, r.destination_rank, r.num_heads, r.source_head, r.destination_head) for r in routes(6, 3, 2)]
    assert found == [(0, 0, 2, 0, 0), (1, 0, 1, 0, 2), (1, 1, 1, 1, 0), (2, 1, 2, 0, 1)]


def test_what_does_not_divide_or_differs_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"source_degree=5 must divide the model's 12 KV heads"):
        routes(HEADS, 5, 1)
    with pytest.raises(InvalidArgument, match="destination_degree=0"):
        routes(HEADS, 1, 0)
    with pytest.raises(InvalidArgument, match="pages differ: 4 tokens of 6 bytes a head here, 8 tokens"):
        route_spans(routes(HEADS, 2, 1)[0], RankPool(6, 4, 8), RankPool(12, 8, 8), 0, [1], [1])
    with pytest.raises(InvalidArgument, match=r"pages \[0, 3\) asked for, but only 1 are known"):
        route_spans(routes(HEADS, 2, 1)[0], RankPool(6, 4, 8), RankPool(12, 4, 8), 0, [1], [1, 2, 3], 0, 3)


def test_a_digest_of_columns_is_that_of_a_pool_which_has_only_them() -> None:
    with open_agent(AgentConfig(instance_id="digest", backend="loopback")) as agent:
        whole, part = RankPool(6, 4, 8), RankPool(2, 4, 8)
        wide, narrow = agent.allocate(len(whole.empty())), agent.allocate(len(part.empty()))
        table = whole.array(np.frombuffer(wide.buffer, dtype=np.uint8))
        table[:] = np.random.default_rng(2).integers(0, 256, table.shape)
        part.array(np.frombuffer(narrow.buffer, dtype=np.uint8))[:] = table[..., 3:5, :]
        runs = [(plane * whole.plane_bytes + 2 * whole.page_bytes, 3 * whole.page_bytes) for plane in range(4)]
        own = [(plane * part.plane_bytes + 2 * part.page_bytes, 3 * part.page_bytes) for plane in range(4)]
        row = 6 * HEAD_BYTES
        assert digest(wide, runs, (row, 3 * HEAD_BYTES, 5 * HEAD_BYTES)) == digest(narrow, own)
        assert digest(wide, runs, (row, 2 * HEAD_BYTES, 4 * HEAD_BYTES)) != digest(narrow, own)
        with pytest.raises(InvalidArgument, match="do not fit a run"):
            digest(wide, [(0, row + 1)], (row, 0, 1))
        del table


def test_heads_that_are_all_of_a_rank_need_no_columns() -> None:
    assert own_heads(0, 6, RankPool(6, 4, 8)) is None
    assert own_heads(2, 4, RankPool(6, 4, 8)) == (2, 4)


def test_ranks_of_one_device_share_an_agent_and_nothing_stays_open_when_one_fails() -> None:
    config = AgentConfig(instance_id="ranks", backend="loopback")
    memories = open_ranks(config, ["", "", ""], 4096)
    assert len(memories.agents) == 1
    assert len({region.address for region in memories.regions}) == 3
    memories.close()
    with pytest.raises(InvalidArgument):
        open_ranks(config, ["", ""], 0)
