"""Exact attention over pages, on a CPU: no gather, no mask, no loop over tokens.

A sequence's tokens lie in few extents, and each is a strided view of the pool. Every view is one call of torch's blocked attention;
where a query needs several (several extents, or a cached prefix before a chunk) the partial results are merged by their log-sum-exp,
which is exact up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool


class Span:
    """Queries of one sequence, rows [first_row, first_row + count) of the step, for tokens [start, start + count)."""

    __slots__ = ("count", "first_row", "keys", "values")

    def __init__(self, pool: KVPool, pages: PageTable, first_row: int, start: int, count: int) -> None:
        self.first_row = first_row
        self.count = count
        # One query sees itself too; a chunk's own keys are taken from the step, under a causal mask.
        visible = start + 1 if count == 1 else start
        self.keys: list[tuple[Tensor, ...]] = []
        self.values: list[tuple[Tensor, ...]] = []
        if visible:
            for slot, length in pages.runs(0, visible, pool.layout.page_size):
                # [layers, 2, 1, kv heads, tokens, head dim], cut into layers once a step: cheaper than slicing in every layer.
                view = pool.planes[:, :, slot : slot + length].transpose(2, 3).unsqueeze(2)
                self.keys.append(view.select(1, 0).unbind(0))
                self.values.append(view.select(1, 1).unbind(0))


def attend(spans: List[Span], layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[rows, heads * head dim]: attention of all rows of a step in one layer.

    query [rows, heads, head dim]; keys, values [rows, kv heads, head dim]: this step's own, already written to the pool.
    """
    rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    folded = query.view(rows, 1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    parts: list[Tensor] = []
    for span in spans:
        if span.count == 1:
            # Heads that share a KV head become queries: one pass over the keys for the whole group.
            part = _over_pages(span, layer, folded[span.first_row])
            parts.append(part.reshape(1, num_heads * head_dim))
        else:
            rows_of = slice(span.first_row, span.first_row + span.count)
            parts.append(_chunk(span, layer, query[rows_of], keys[rows_of], values[rows_of]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _flash(query: Tensor, keys: Tensor, values: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """torch's CPU flash attention by its own name, because the public function does not return the log-sum-exp.

    query [1, heads, n, d]; keys, values [1, kv heads, m, d], any strides but the last -> [1, heads, n, d], [1, heads, n].
    """
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, causal)  # noqa: SLF001
    return output, logsumexp


def _over_pages(span: Span, layer: int, query: Tensor) -> Tensor:
    output, logsumexp = _flash(query, span.keys[0][layer], span.values[0][layer])
    for keys, values in zip(span.keys[1:], span.values[1:], strict=True):
        output, logsumexp = _merge(output, logsumexp, *_flash(query, keys[layer], values[layer]))
    return output


def _chunk(span: Span, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    queries = query.transpose(0, 1).unsqueeze(0)
    own_keys, own_values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    output, logsumexp = _flash(queries, own_keys, own_values, causal=True)
    for prefix_keys, prefix_values in zip(span.keys, span.values, strict=True):
        output, logsumexp = _merge(output, logsumexp, *_flash(queries, prefix_keys[layer], prefix_values[layer]))
    # The kernel writes [1, n, heads, d] in memory: no copy here.
    return output.transpose(1, 2).reshape(span.count, -1)


def _merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(other_logsumexp - logsumexp).unsqueeze(-1)
    merged = torch.lerp(output.float(), other.float(), share).to(output.dtype)
    return merged, torch.logaddexp(logsumexp, other_logsumexp)
