"""Attention over paged keys and values, one sequence after the other."""

from __future__ import annotations

from collections.abc import Sequence as List
from itertools import pairwise

import torch
from torch import Tensor


def naive_decode_attention(
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
    """One query a sequence against its paged keys and values.

    query [sequences, heads, head dim]; keys, values [pages, page size, kv heads, head dim], heads a multiple of kv heads;
    page_table [sequences, max pages] int32, the sequence's pages in order (what lies behind its length is not read);
    lengths [sequences] int32, tokens of each sequence; 0 (a padding row) gives zeros. scale: of the scores; None is 1 / sqrt(head dim).
    window: a query sees this many last tokens, itself among them; 0 is all. num_splits, split_tokens: how the kernel shares out its work.
    Returns [sequences, heads, head dim] in query's dtype (`out` when given); computed in float32.
    """
    output = torch.empty_like(query) if out is None else out
    for sequence, length in enumerate(lengths.tolist()):
        chunk = query[sequence : sequence + 1]
        output[sequence] = _attend(chunk, *_tokens(keys, values, page_table[sequence], length), scale, window)[0] if length else 0
    return output


def naive_prefill_attention(
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
    """The last queries of several sequences, causal, against paged keys and values (those of the queries already written).

    query [tokens, heads, head dim], sequence s owning rows query_starts[s] to query_starts[s + 1]; query_starts [sequences + 1] int32;
    lengths [sequences] int32, each sequence's tokens with these; max_query_len: at least the longest run of queries (the kernel's grid).
    The rest as in `naive_decode_attention`. Rows that no sequence owns come back as zeros.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    output.zero_()
    starts = query_starts.tolist()
    for sequence, length in enumerate(lengths.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if last > first:
            output[first:last] = _attend(query[first:last], *_tokens(keys, values, page_table[sequence], length), scale, window)
    return output


def naive_fresh_attention(query: Tensor, keys: Tensor, values: Tensor, query_starts: List[int], scale: float | None = None) -> Tensor:
    """Whole prompts without a prefix, causal: query [tokens, heads, head dim]; keys, values [tokens, kv heads, head dim], not paged.

    query_starts: prompt p owns rows query_starts[p] to query_starts[p + 1]; all rows are owned. Returns [tokens, heads, head dim].
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for first, last in pairwise(query_starts):
        output[first:last] = _attend(query[first:last], keys[first:last].float(), values[first:last].float(), scale, 0)
    return output


def _tokens(keys: Tensor, values: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values, [length, kv heads, head dim] float32."""
    pages = table[: -(-length // keys.shape[1])].long()
    return tuple(each[pages].flatten(0, 1)[:length].float() for each in (keys, values))  # type: ignore[return-value]


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int) -> Tensor:
    """The last len(query) tokens of a sequence against all of it: [queries, heads, head dim] in query's dtype."""
    num_queries, num_heads, head_dim = query.shape
    length, num_kv_heads, _ = keys.shape
    factor = head_dim**-0.5 if scale is None else scale
    grouped = query.float().reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,tkd->kgqt", grouped, keys) * factor
    behind = torch.arange(length - num_queries, length, device=query.device).unsqueeze(1) - torch.arange(length, device=query.device)
    hidden = behind < 0 if window == 0 else (behind < 0) | (behind >= window)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("kgqt,tkd->qkgd", weights, values).reshape(query.shape).to(query.dtype)
