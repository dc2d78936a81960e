"""Attention over extents against the naive paged twin and against plain torch."""

from __future__ import annotations

import pytest
import torch

from baton.engine.attention import Span, attend
from baton.engine.layout import KVLayout
from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool, Writes
from baton.engine.types import Extent
from baton.kernels import naive_decode_attention

PAGE_SIZE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=64, page_size=PAGE_SIZE, num_pages=60, itemsize=4)
# Each sequence's extents, and its length in tokens; together they share one pool.
SEQUENCES = [([Extent(0, 3)], 10), ([Extent(5, 1), Extent(9, 2), Extent(3, 2)], 19), ([Extent(20, 20)], 80), ([Extent(50, 1)], 1)]


@pytest.fixture
def pool():
    pool = KVPool(LAYOUT, torch.float32)
    pool.planes.fill_(float("nan"))
    return pool


def table_of(extents):
    table = PageTable()
    for extent in extents:
        table.append(extent)
    return table


def fill(pool, table, length, generator):
    for slot, count in table.runs(0, length, PAGE_SIZE):
        pool.planes[:, :, slot : slot + count] = torch.randn(2, 2, count, 3, 64, generator=generator)


def test_decode_rows_are_the_naive_paged_twin(pool):
    generator = torch.Generator().manual_seed(0)
    spans, rows = [], torch.zeros(len(SEQUENCES), 20, dtype=torch.int32)
    for index, (extents, length) in enumerate(SEQUENCES):
        table = table_of(extents)
        fill(pool, table, length, generator)
        spans.append(Span(pool, table, index, length - 1, 1))
        pages = [page for extent in extents for page in range(extent.first, extent.end)]
        rows[index, : len(pages)] = torch.tensor(pages)
    query = torch.randn(len(SEQUENCES), 9, 64, generator=generator)
    lengths = torch.tensor([length for _, length in SEQUENCES], dtype=torch.int32)
    for layer in range(2):
        paged = pool.layers[layer].view(2, 60, PAGE_SIZE, 3, 64)
        expected = naive_decode_attention(query, paged[0], paged[1], rows, lengths)
        own = torch.full((len(SEQUENCES), 3, 64), float("nan"))
        result = attend(spans, layer, query, own, own)
        torch.testing.assert_close(result.view(-1, 9, 64), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("prefix", [0, 1, 6, 12, 17])
def test_a_chunk_sees_its_prefix_and_itself_up_to_the_diagonal(pool, prefix):
    generator = torch.Generator().manual_seed(prefix)
    count = 7
    table = table_of([Extent(30, 2), Extent(10, 1), Extent(40, 4)])
    fill(pool, table, prefix, generator)
    query = torch.randn(count, 9, 64, generator=generator)
    keys, values = torch.randn(2, count, 3, 64, generator=generator)
    writes = Writes(torch.empty(0, dtype=torch.int64), [])
    row = 0
    for slot, length in table.runs(prefix, count, PAGE_SIZE):
        writes.runs.append((row, slot, length))
        row += length
    for layer in range(2):
        pool.write(layer, writes, torch.stack((keys, values), dim=1))
        result = attend([Span(pool, table, 0, prefix, count)], layer, query, keys, values)
        slots = [place for slot, length in table.runs(0, prefix + count, PAGE_SIZE) for place in range(slot, slot + length)]
        all_keys, all_values = (pool.layers[layer][plane, slots].transpose(0, 1).unsqueeze(0) for plane in (0, 1))
        mask = torch.ones(count, prefix + count, dtype=torch.bool).tril(prefix)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0), all_keys, all_values, attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(result, expected[0].transpose(0, 1).reshape(count, -1), atol=2e-6, rtol=2e-6)


def test_scattered_and_run_writes_fill_the_same_slots(pool):
    rows = torch.randn(5, 2, 3, 64)
    pool.write(0, Writes(torch.tensor([7, 3]), [(2, 20, 3)]), rows)
    slots = [7, 3, 20, 21, 22]
    assert torch.equal(pool.layers[0][:, slots], rows.transpose(0, 1))
    assert int(pool.layers[0].isfinite().sum()) == rows.numel()
    assert pool.layers[1].isnan().all()
