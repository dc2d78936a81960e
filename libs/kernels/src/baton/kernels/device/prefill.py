"""Paged prefill attention: a program for some queries of a sequence and all query heads of one KV head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.device.decode import LOG2_E, MIN_ROWS, pages_of


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """rows: queries times heads of a group that a program holds; block: tokens it looks at in one go."""

    rows: int
    block: int
    num_warps: int
    num_stages: int


def default_tiling(max_rows: int, dims: int, itemsize: int) -> PrefillTiling:
    """max_rows: queries of the longest run times heads of a group. dims: of a padded head."""
    if itemsize > 2:
        # Without tensor cores every product is unrolled: small tiles, or nothing fits into registers.
        return PrefillTiling(rows=16, block=16, num_warps=4, num_stages=2)
    if dims > 128:
        return PrefillTiling(rows=64, block=32, num_warps=4, num_stages=2)
    if max_rows <= 64:
        return PrefillTiling(rows=64, block=64, num_warps=4, num_stages=3)
    return PrefillTiling(rows=128, block=64, num_warps=8, num_stages=3)


def launch_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
    out: Tensor | None,
    tiling: PrefillTiling | None = None,
) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    _, page_size, num_kv_heads, _ = keys.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if num_tokens == 0 or len(page_table) == 0:
        return output
    group = num_heads // num_kv_heads
    dims = max(MIN_ROWS, triton.next_power_of_2(head_dim))
    tiling = tiling or default_tiling(max_query_len * group, dims, keys.element_size())
    rows = max(tiling.rows, triton.next_power_of_2(group))
    per_tile = rows // group
    _prefill_kernel[(triton.cdiv(max_query_len, per_tile), num_kv_heads, len(page_table))](
        query,
        keys,
        values,
        page_table,
        query_starts,
        lengths,
        output,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        page_table.stride(0),
        output.stride(0),
        output.stride(1),
        head_dim=head_dim,
        group=group,
        page_size=page_size,
        window=window,
        per_tile=per_tile,
        rows=rows,
        dims=dims,
        block=tiling.block,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    best,
    total,
    mixed,
    q,
    keys,
    values,
    table,
    begin,
    end,
    length,
    position,
    scale,
    page_stride,
    token_stride,
    kv_head_offset,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    masked: tl.constexpr,
    dims: tl.constexpr,
    block: tl.constexpr,
):
    """Tokens begin (a multiple of block) to end into the running softmax; not masked: every row sees every one of them."""
    lane = tl.arange(0, block)
    dim = tl.arange(0, dims)
    # A block's pages are looked up one round ahead, so that the loads of keys and values do not wait for them.
    pages = pages_of(table, begin + lane, begin, length, page_size, block)
    for start in range(begin, end, block):
        tokens = start + lane
        places = pages.to(tl.int64) * page_stride + (tokens % page_size) * token_stride + kv_head_offset
        pages = pages_of(table, tokens + block, start + block, length, page_size, block)
        if masked:
            there = (tokens < length)[:, None] & (dim < head_dim)[None, :]
            k = tl.load(keys + places[:, None] + dim[None, :], mask=there, other=0.0)
            v = tl.load(values + places[:, None] + dim[None, :], mask=there, other=0.0)
        elif head_dim == dims:
            k = tl.load(keys + places[:, None] + dim[None, :])
            v = tl.load(values + places[:, None] + dim[None, :])
        else:
            k = tl.load(keys + places[:, None] + dim[None, :], mask=(dim < head_dim)[None, :], other=0.0)
            v = tl.load(values + places[:, None] + dim[None, :], mask=(dim < head_dim)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if masked:
            seen = tokens[None, :] <= position[:, None]
            if window > 0:
                seen = seen & (tokens[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1) * scale)
        # Where a row has seen nothing yet (a window that begins later), -inf minus -inf must not be taken.
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best) if window > 0 else new_best
        weights = tl.exp2(scores * scale - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        best = new_best
    return best, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _prefill_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    page_table,
    query_starts,
    lengths,
    output,
    scale,
    query_token_stride,
    query_head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    output_token_stride,
    output_head_stride,
    head_dim: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    per_tile: tl.constexpr,
    rows: tl.constexpr,
    dims: tl.constexpr,
    block: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    first_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_row
    # The tiles that see most come first.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * per_tile
    if first_query >= num_queries:
        return
    length = tl.load(lengths + sequence)
    row = tl.arange(0, rows)
    dim = tl.arange(0, dims)
    token = first_query + row // group
    head = kv_head * group + row % group
    inside = ((token < num_queries) & (row < per_tile * group))[:, None] & (dim < head_dim)[None, :]
    place = (first_row + token).to(tl.int64)
    q = tl.load(query + place[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :], mask=inside, other=0.0)

    first_position = length - num_queries + first_query
    position = length - num_queries + token
    end = tl.minimum(first_position + per_tile, length)
    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mixed = tl.zeros((rows, dims), tl.float32)
    table = page_table + sequence * table_stride
    kv_head_offset = kv_head * kv_head_stride
    begin = 0
    if window > 0:
        begin = tl.maximum(first_position - window + 1, 0) // block * block
    else:
        # What all rows see needs no mask.
        begin = (first_position + 1) // block * block
        best, total, mixed = _attend(
            best,
            total,
            mixed,
            q,
            keys,
            values,
            table,
            0,
            begin,
            length,
            position,
            scale,
            page_stride,
            token_stride,
            kv_head_offset,
            head_dim,
            page_size,
            window,
            False,
            dims,
            block,
        )
    best, total, mixed = _attend(
        best,
        total,
        mixed,
        q,
        keys,
        values,
        table,
        begin,
        end,
        length,
        position,
        scale,
        page_stride,
        token_stride,
        kv_head_offset,
        head_dim,
        page_size,
        window,
        True,
        dims,
        block,
    )
    target = output + place[:, None] * output_token_stride + head[:, None] * output_head_stride + dim[None, :]
    tl.store(target, (mixed / total[:, None]).to(output.dtype.element_ty), mask=inside)
