"""Paged attention against its naive twins, and those against torch's attention."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, close, random, scattered

from baton.kernels import decode_attention, fresh_attention, naive_decode_attention, naive_fresh_attention, naive_prefill_attention, prefill_attention

# (heads, kv heads, head dim, page size, window, lengths)
DECODE = [
    (6, 2, 64, 16, 0, [1, 15, 17, 150]),
    (4, 4, 32, 1, 0, [1, 2, 65]),
    (8, 1, 128, 32, 0, [129, 0, 64]),
    (8, 2, 80, 16, 0, [37, 1, 0, 100]),
    (14, 2, 96, 16, 20, [33, 19, 20, 21, 0]),
    (8, 1, 128, 256, 0, [255, 257]),
    (4, 1, 64, 128, 100, [333]),
]
WAYS = [{"num_splits": 3}, {"split_tokens": 128}, {"num_splits": 1}, {}]
# The interpreter is slow: there the second dtype is tried with one way of splitting.
SPLITS = [(way, dtype) for dtype in TOLERANCE for way in WAYS if DEVICE == "cuda" or dtype is torch.float32 or way == WAYS[0]]
# (heads, kv heads, head dim, page size, window, [(length, of it queries)])
PREFILL = [
    (3, 3, 64, 16, 0, [(1, 1), (17, 17), (40, 3), (70, 16)]),
    (8, 1, 128, 32, 0, [(65, 33), (5, 5)]),
    (7, 1, 80, 16, 0, [(37, 20)]),
    (8, 2, 96, 16, 10, [(45, 30), (9, 9)]),
    (4, 2, 64, 128, 70, [(150, 40)]),
]


@pytest.mark.parametrize("case", DECODE, ids=str)
@pytest.mark.parametrize(("splits", "dtype"), SPLITS, ids=str)
def test_decode_is_its_naive_twin(case, splits, dtype):
    num_heads, num_kv_heads, head_dim, page_size, window, lengths = case
    paged = scattered(lengths, page_size, num_kv_heads, head_dim, dtype)
    query = random(len(lengths), num_heads, head_dim, dtype=dtype)
    result = decode_attention(query, *paged, window=window, **splits)
    assert result.isfinite().all(), "a slot that nobody wrote was read, or one of the output was not written"
    close(result, naive_decode_attention(query.float(), paged[0].float(), paged[1].float(), *paged[2:], window=window), dtype)


def test_decode_in_fixed_shares_does_not_know_its_batch():
    paged = scattered([300, 77, 500, 0], 16, 2, 64, torch.float32)
    query = random(4, 8, 64, dtype=torch.float32)
    together = decode_attention(query, *paged, split_tokens=128)
    for row in range(4):
        # Neither the other sequences nor the width of the table matter.
        pages = -(-int(paged[3][row]) // 16) or 1
        alone = decode_attention(query[row : row + 1], paged[0], paged[1], paged[2][row : row + 1, :pages], paged[3][row : row + 1], split_tokens=128)
        assert torch.equal(alone[0], together[row])


def test_decode_takes_strided_queries_and_writes_only_where_it_should():
    paged = scattered([33, 5], 16, 2, 64, torch.float32)
    qkv = random(2, 12 * 64, dtype=torch.float32)
    query = qkv.view(2, 12, 64)[:, :8]
    guarded = torch.full((4, 8, 64), float("nan"), device=DEVICE)
    result = decode_attention(query, *paged, scale=0.5, num_splits=2, out=guarded[1:3])
    close(result, naive_decode_attention(query, *paged, scale=0.5), torch.float32)
    assert guarded[[0, 3]].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_prefill_is_its_naive_twin(case, dtype):
    num_heads, num_kv_heads, head_dim, page_size, window, runs = case
    paged = scattered([length for length, _ in runs], page_size, num_kv_heads, head_dim, dtype)
    starts = torch.tensor([0, *(count for _, count in runs)], device=DEVICE).cumsum(0).to(torch.int32)
    num_queries, longest = int(starts[-1]), max(count for _, count in runs)
    qkv = random(num_queries + 2, (num_heads + 1) * head_dim, dtype=dtype)
    query = qkv.view(num_queries + 2, num_heads + 1, head_dim)[:, :num_heads]
    guarded = torch.full((num_queries + 2, num_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    prefill_attention(query, *paged[:3], starts, paged[3], longest, window=window, out=guarded)
    assert guarded[num_queries:].isnan().all(), "a row that no sequence owns was written"
    wide = (query[:num_queries].float(), paged[0].float(), paged[1].float(), paged[2], starts, paged[3], longest)
    expected = naive_prefill_attention(*wide, window=window)
    assert guarded[:num_queries].isfinite().all()
    close(guarded[:num_queries], expected, dtype)


def test_prefill_of_one_query_is_decode():
    paged = scattered([33, 70], 16, 2, 64, torch.float32)
    query = random(2, 8, 64, dtype=torch.float32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    close(prefill_attention(query, *paged[:3], starts, paged[3], 1), decode_attention(query, *paged), torch.float32)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_naive_twins_are_torch_attention(scale):
    query, keys, values = (random(30, heads, 32, dtype=torch.float32, seed=heads) for heads in (6, 2, 3))
    values = values[:, :2]
    as_torch = [each.transpose(0, 1).unsqueeze(0) for each in (query, keys, values)]
    expected = torch.nn.functional.scaled_dot_product_attention(*as_torch, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)
    close(naive_fresh_attention(query, keys, values, [0, 30], scale), expected, torch.float32)
    table = torch.arange(8, dtype=torch.int32, device=DEVICE).view(1, 8)
    length = torch.tensor([30], dtype=torch.int32, device=DEVICE)
    paged = [torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 2)).view(8, 4, 2, 32) for each in (keys, values)]
    starts = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)
    close(naive_prefill_attention(query[21:], *paged, table, starts, length, 9, scale), expected[21:], torch.float32)
    close(naive_decode_attention(query[29:], *paged, table, length, scale), expected[29:], torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fresh_prompts(dtype):
    lengths = [3, 1, 40] if DEVICE == "cpu" else [3, 1, 1024, 40]
    heads = random(sum(lengths), 12, 64, dtype=dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    query, keys, values = heads[:, :8], heads[:, 8:10], heads[:, 10:]
    close(fresh_attention(query, keys, values, starts), naive_fresh_attention(query.float(), keys.float(), values.float(), starts), dtype)


def test_a_window_in_the_naive_twins_is_a_shorter_sequence():
    keys, values, table, length = scattered([48], 16, 2, 32, torch.float32)
    query = random(1, 4, 32, dtype=torch.float32)
    short = naive_decode_attention(query, keys, values, table[:, 2:].contiguous(), length - 32)
    close(naive_decode_attention(query, keys, values, table, length, window=16), short, torch.float32)


@pytest.mark.parametrize(
    ("place", "shape", "name"), [(0, (2, 5, 32), "heads"), (1, (9, 4, 2, 16), "keys"), (4, (3,), "lengths"), (3, (1, 4), "page_table")]
)
def test_shapes_that_do_not_fit_are_refused(place, shape, name):
    arguments = [random(2, 6, 32, dtype=torch.float32), *scattered([30, 9], 4, 2, 32, torch.float32)]
    arguments[place] = torch.zeros(shape, dtype=arguments[place].dtype, device=DEVICE)
    with pytest.raises(ValueError, match=name):
        decode_attention(*arguments)


def test_options_that_do_not_fit_are_refused():
    arguments = [random(2, 6, 32, dtype=torch.float32), *scattered([30, 9], 5, 2, 32, torch.float32)]
    with pytest.raises(ValueError, match="page size = 5"):
        decode_attention(*arguments)
    with pytest.raises(ValueError, match="split_tokens = 100"):
        decode_attention(*arguments, split_tokens=100)
    with pytest.raises(ValueError, match="at most one"):
        decode_attention(*arguments, split_tokens=128, num_splits=1)
