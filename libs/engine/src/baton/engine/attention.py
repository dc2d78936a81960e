"""Exact attention over pages, on a CPU: no gather, no mask, no loop over tokens.

A sequence's tokens lie in few extents, and each is a strided view of the pool. Every view is one call of torch's blocked attention;
where a query needs several (several extents, or a cached prefix before a chunk) the partial results are merged by their log-sum-exp,
which is exact up to rounding. Only a chunk that a sliding window cuts is computed under a mask, block by block.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool

#: Queries of a windowed chunk that share one call. A query must see one of the first 512 keys of its call (the kernel's block), or its
#: running maximum would start at minus infinity: the keys hidden before a query's window are fewer than this.
_BLOCK_ROWS = 256

#: For each run of pages, keys and values [1, kv heads, tokens, head dim] of every layer.
Views = list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows [first, first + count) of a chunk, all that any of them sees, and the mask [count, keys] that is added to their scores."""

    first: int
    count: int
    views: Views
    mask: Tensor


class Span:
    """Queries of one sequence, rows [first_row, first_row + count) of the step, for tokens [start, start + count).

    Views of pages are made when a layer first asks for them, once a step and window.
    """

    __slots__ = ("_blocks", "_pages", "_pool", "_views", "count", "first_row", "start")

    def __init__(self, pool: KVPool, pages: PageTable, first_row: int, start: int, count: int) -> None:
        self.first_row = first_row
        self.start = start
        self.count = count
        self._pool = pool
        self._pages = pages
        self._views: dict[int, Views] = {}
        self._blocks: dict[int, list[_Block]] = {}

    def reaches_past(self, window: int) -> bool:
        """Whether `window` (0: none) hides a token from a query of this span."""
        return 0 < window < self.start + self.count

    def views(self, window: int) -> Views:
        """Pages that the queries see: a decode row's own token too; of a chunk (only without a window) what lies before it,
        because its own keys are taken from the step, under a causal mask."""
        views = self._views.get(window)
        if views is None:
            end = self.start + 1 if self.count == 1 else self.start
            views = self._views[window] = self._cut(max(0, end - window) if window else 0, end)
        return views

    def blocks(self, window: int) -> list[_Block]:
        """The chunk in blocks of queries, each with the pages from its first query's window to its last query."""
        if window not in self._blocks:
            firsts = range(0, self.count, _BLOCK_ROWS)
            self._blocks[window] = [self._block(first, min(_BLOCK_ROWS, self.count - first), window) for first in firsts]
        return self._blocks[window]

    def _block(self, first: int, count: int, window: int) -> _Block:
        begin, end = self.start + first, self.start + first + count
        low = max(0, begin - window + 1)
        queries = torch.arange(begin, end).unsqueeze(1)
        tokens = torch.arange(low, end)
        hidden = (tokens > queries) | (tokens <= queries - window)
        mask = torch.zeros(hidden.shape, dtype=self._pool.planes.dtype).masked_fill_(hidden, float("-inf"))
        return _Block(first, count, self._cut(low, end), mask)

    def _cut(self, low: int, end: int) -> Views:
        views: Views = []
        if low < end:
            for slot, length in self._pages.runs(low, end - low, self._pool.layout.page_size):
                # [layers, 2, 1, kv heads, tokens, head dim], cut into layers once a step: cheaper than slicing in every layer.
                view = self._pool.planes[:, :, slot : slot + length].transpose(2, 3).unsqueeze(2)
                views.append((view.select(1, 0).unbind(0), view.select(1, 1).unbind(0)))
        return views


def attend(spans: List[Span], layer: int, query: Tensor, keys: Tensor, values: Tensor, window: int = 0) -> Tensor:
    """[rows, heads * head dim]: attention of all rows of a step in one layer.

    query [rows, heads, head dim]; keys, values [rows, kv heads, head dim]: this step's own, already written to the pool.
    window: how many tokens a query sees, itself included; 0: all before it. Pages that lie before every window stay in the sequence's
    table, unread: they are given back with the sequence, not earlier.
    """
    rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    folded = query.view(rows, 1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    parts: list[Tensor] = []
    for span in spans:
        reach = window if window and span.reaches_past(window) else 0
        if span.count == 1:
            # Heads that share a KV head become queries: one pass over the keys for the whole group.
            part = _over_pages(span.views(reach), layer, folded[span.first_row])
            parts.append(part.reshape(1, num_heads * head_dim))
            continue
        rows_of = slice(span.first_row, span.first_row + span.count)
        if reach:
            parts += [_block(block, layer, query[rows_of]) for block in span.blocks(reach)]
        else:
            parts.append(_chunk(span, layer, query[rows_of], keys[rows_of], values[rows_of]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _flash(query: Tensor, keys: Tensor, values: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """torch's CPU flash attention by its own name, because the public function does not return the log-sum-exp.

    query [1, heads, n, d]; keys, values [1, kv heads, m, d], any strides but the last -> [1, heads, n, d], [1, heads, n].
    """
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, causal)  # noqa: SLF001
    return output, logsumexp


def _flash_masked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """mask [n, m] of query's dtype is added to the scores. A function of its own: the keyword alone takes a tenth of a decode row's call."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    output: Tensor = flash(query, keys, values, 0.0, False, attn_mask=mask)[0]
    return output


def _over_pages(views: Views, layer: int, query: Tensor) -> Tensor:
    keys, values = views[0]
    output, logsumexp = _flash(query, keys[layer], values[layer])
    for keys, values in views[1:]:
        output, logsumexp = _merge(output, logsumexp, *_flash(query, keys[layer], values[layer]))
    return output


def _chunk(span: Span, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    queries = query.transpose(0, 1).unsqueeze(0)
    own_keys, own_values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    output, logsumexp = _flash(queries, own_keys, own_values, causal=True)
    for prefix_keys, prefix_values in span.views(0):
        output, logsumexp = _merge(output, logsumexp, *_flash(queries, prefix_keys[layer], prefix_values[layer]))
    # The kernel writes [1, n, heads, d] in memory: no copy here.
    return output.transpose(1, 2).reshape(span.count, -1)


def _block(block: _Block, layer: int, query: Tensor) -> Tensor:
    """Scattered pages are gathered here: partial results of single extents could have rows that see nothing, which do not merge."""
    queries = query[block.first : block.first + block.count].transpose(0, 1).unsqueeze(0)
    keys, values = (
        block.views[0][plane][layer] if len(block.views) == 1 else torch.cat([view[plane][layer] for view in block.views], dim=2) for plane in (0, 1)
    )
    return _flash_masked(queries, keys, values, block.mask).transpose(1, 2).reshape(block.count, -1)


def _merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(other_logsumexp - logsumexp).unsqueeze(-1)
    merged = torch.lerp(output.float(), other.float(), share).to(output.dtype)
    return merged, torch.logaddexp(logsumexp, other_logsumexp)
