"""Attention: decode and prefill over pages, and fresh prompts through torch."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

from baton.kernels.dispatch import FLOATS, at_least, expect, expect_dense, expect_pages, power_of_two, runs_triton
from baton.kernels.limits import MAX_HEAD_DIM, MAX_PAGE_SIZE
from baton.kernels.naive import naive_decode_attention, naive_fresh_attention, naive_prefill_attention


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    *,
    window: int = 0,
    num_splits: int | None = None,
    split_tokens: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `naive_decode_attention`; on a GPU split over each sequence, accumulated in float32. Raises ValueError.

    num_splits: into how many shares a sequence is cut at most; None is chosen from the shapes. split_tokens: shares of so many tokens (a
    power of two, at least 128) instead, so that a sequence's result depends on nothing but itself: the deterministic mode.
    query and out may be strided but for the head dimension.
    """
    _check_query(query, keys, values)
    num_sequences = len(query)
    expect("page_table", page_table, (num_sequences, -1), torch.int32)
    expect_dense("page_table", page_table)
    expect("lengths", lengths, (num_sequences,), torch.int32)
    at_least("window", window, 0)
    if out is not None:
        expect("out", out, tuple(query.shape), query.dtype)
        expect_dense("out", out)
    if num_splits is not None and split_tokens is not None:
        raise ValueError(f"num_splits = {num_splits} and split_tokens = {split_tokens}; at most one of them may be given")
    if num_splits is not None:
        at_least("num_splits", num_splits, 1)
    if split_tokens is not None:
        at_least("split_tokens", split_tokens, 128)
        power_of_two("split_tokens", split_tokens, 1 << 20)
    if not runs_triton(query):
        return naive_decode_attention(query, keys, values, page_table, lengths, scale, window=window, out=out)
    power_of_two("page size", keys.shape[1], MAX_PAGE_SIZE)
    from baton.kernels.device.decode import launch_decode

    factor = query.shape[2] ** -0.5 if scale is None else scale
    return launch_decode(query, keys, values, page_table, lengths, factor, window, num_splits, split_tokens, out)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    max_query_len: int,
    scale: float | None = None,
    *,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """As `naive_prefill_attention`, but that rows which no sequence owns are left as they are (undefined without `out`). Raises ValueError."""
    _check_query(query, keys, values)
    num_sequences = len(page_table)
    expect("page_table", page_table, (-1, -1), torch.int32)
    expect_dense("page_table", page_table)
    expect("query_starts", query_starts, (num_sequences + 1,), torch.int32)
    expect("lengths", lengths, (num_sequences,), torch.int32)
    at_least("max_query_len", max_query_len, 1)
    at_least("window", window, 0)
    if out is not None:
        expect("out", out, tuple(query.shape), query.dtype)
        expect_dense("out", out)
    if not runs_triton(query):
        return naive_prefill_attention(query, keys, values, page_table, query_starts, lengths, max_query_len, scale, window=window, out=out)
    power_of_two("page size", keys.shape[1], MAX_PAGE_SIZE)
    from baton.kernels.device.prefill import launch_prefill

    factor = query.shape[2] ** -0.5 if scale is None else scale
    return launch_prefill(query, keys, values, page_table, query_starts, lengths, max_query_len, factor, window, out)


def fresh_attention(query: Tensor, keys: Tensor, values: Tensor, query_starts: List[int], scale: float | None = None) -> Tensor:
    """As `naive_fresh_attention`; on a GPU torch's attention, cuDNN's before flash's: both beat what Triton reaches on whole prompts.

    query [tokens, heads, head dim], keys and values [tokens, kv heads, head dim] may be strided views of one qkv. Raises ValueError.
    """
    expect("query", query, (-1, -1, -1), FLOATS)
    expect("keys", keys, (len(query), -1, query.shape[2]), query.dtype)
    expect("values", values, tuple(keys.shape), query.dtype)
    if query.shape[1] % keys.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads, keys {keys.shape[1]}; the first must be a multiple of the second")
    if not query_starts or query_starts[0] != 0 or query_starts[-1] != len(query):
        raise ValueError(f"query_starts = {list(query_starts)}; it must go from 0 to the number of rows, {len(query)}")
    if not query.is_cuda:
        return naive_fresh_attention(query, keys, values, query_starts, scale)
    from baton.kernels.device.fresh import torch_fresh_attention

    return torch_fresh_attention(query, keys, values, query_starts, scale)


def _check_query(query: Tensor, keys: Tensor, values: Tensor) -> None:
    expect("query", query, (-1, -1, -1), keys.dtype)
    expect_dense("query", query)
    expect_pages(keys, values, query.shape[2])
    if query.shape[1] % keys.shape[2]:
        raise ValueError(f"query has {query.shape[1]} heads, keys {keys.shape[2]}; the first must be a multiple of the second")
    if query.shape[2] > MAX_HEAD_DIM:
        raise ValueError(f"query has a head dimension of {query.shape[2]}; attention takes at most {MAX_HEAD_DIM}")
