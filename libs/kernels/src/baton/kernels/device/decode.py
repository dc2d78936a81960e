"""Paged decode attention: each sequence is cut into shares, and a second kernel adds the shares up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import await_predecessor

LOG2_E = 1.4426950408889634
#: The least rows that tl.dot takes.
MIN_ROWS = 16
#: No share is shorter: below that a program's start costs more than its reads.
MIN_SHARE_TOKENS = 128
#: Programs to aim at: three fit on each of an H200's multiprocessors at a time (their shared memory), twice over.
SLOTS = 3 * 132
MAX_SPLITS = 128
#: Shares that the second kernel adds up in one go. Its order is that of the shares, whatever their number.
SPLIT_TILE = 16


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """block: tokens a program looks at in one go."""

    block: int
    num_warps: int
    num_stages: int


def default_tiling(dims: int, itemsize: int) -> DecodeTiling:
    """dims: of a padded head. At 128 of 2 bytes, three programs fit into a multiprocessor's shared memory."""
    if itemsize > 2:
        # Without tensor cores every product is unrolled: small blocks, or nothing fits into registers.
        return DecodeTiling(block=16, num_warps=4, num_stages=2)
    if dims <= 64:
        return DecodeTiling(block=128, num_warps=4, num_stages=3)
    if dims <= 128:
        return DecodeTiling(block=64, num_warps=4, num_stages=3)
    return DecodeTiling(block=32, num_warps=4, num_stages=3)


def choose_splits(num_sequences: int, num_kv_heads: int, max_tokens: int) -> int:
    """The least number of shares that gives the GPU two rounds of programs, of which the last is nearly full; from shapes alone."""
    most = max(1, min(MAX_SPLITS, max_tokens // MIN_SHARE_TOKENS))
    programs = num_sequences * num_kv_heads
    for splits in range(1, most + 1):
        rounds = programs * splits / SLOTS
        if rounds >= 1.9 and rounds / -(-programs * splits // SLOTS) >= 0.9:
            return splits
    return most


def launch_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    num_splits: int | None,
    split_tokens: int | None,
    out: Tensor | None,
    tiling: DecodeTiling | None = None,
) -> Tensor:
    num_sequences, num_heads, head_dim = query.shape
    _, page_size, num_kv_heads, _ = keys.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if num_sequences == 0:
        return output
    dims = max(MIN_ROWS, triton.next_power_of_2(head_dim))
    tiling = tiling or default_tiling(dims, keys.element_size())
    max_tokens = page_table.shape[1] * page_size
    group = num_heads // num_kv_heads
    if split_tokens is not None:
        # With a window, a share may begin up to a block before it.
        splits = max(1, -(-(min(max_tokens, window + tiling.block) if window else max_tokens) // split_tokens))
    else:
        splits = num_splits or choose_splits(num_sequences, num_kv_heads, max_tokens)
    if splits == 1:
        partial, sums = output, output
        partial_strides = (output.stride(0), output.stride(1), 0)
    else:
        partial = torch.empty(num_sequences, num_heads, splits, head_dim, dtype=torch.float32, device=query.device)
        sums = torch.empty(num_sequences, num_heads, splits, dtype=torch.float32, device=query.device)
        partial_strides = (partial.stride(0), partial.stride(1), partial.stride(2))
    share_blocks = 0 if split_tokens is None else max(1, split_tokens // tiling.block)
    _share_kernel[(num_kv_heads, splits, num_sequences)](
        query,
        keys,
        values,
        page_table,
        lengths,
        partial,
        sums,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        page_table.stride(0),
        *partial_strides,
        splits,
        head_dim=head_dim,
        group=group,
        page_size=page_size,
        window=window,
        share_blocks=share_blocks,
        least_blocks=max(1, MIN_SHARE_TOKENS // tiling.block),
        whole=splits == 1,
        rows=max(MIN_ROWS, triton.next_power_of_2(group)),
        dims=dims,
        block=tiling.block,
        chained=is_chained(),
        launch_pdl=is_chained(),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if splits > 1:
        _sum_kernel[(num_sequences, num_heads)](
            partial,
            sums,
            lengths,
            output,
            output.stride(0),
            output.stride(1),
            splits,
            head_dim=head_dim,
            window=window,
            share_blocks=share_blocks,
            least_blocks=max(1, MIN_SHARE_TOKENS // tiling.block),
            block=tiling.block,
            dims=dims,
            tile=SPLIT_TILE,
            chained=is_chained(),
            launch_pdl=is_chained(),
            num_warps=4,
        )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(length, splits, window: tl.constexpr, share_blocks: tl.constexpr, least_blocks: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """First block that is looked at, the block after the last, and blocks a share: from the sequence's own length alone."""
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0) // block
    end = (length + block - 1) // block
    share = share_blocks
    if share_blocks == 0:
        share = tl.maximum((end - first + splits - 1) // splits, least_blocks)
    return first, end, share


@triton.jit  # type: ignore[untyped-decorator]
def pages_of(table, tokens, start, end_token, page_size: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block's pages: one number where the block lies in one page, else one a token."""
    if page_size >= block:
        pages = tl.load(table + start // page_size, mask=start < end_token, other=0)
    else:
        pages = tl.load(table + tokens // page_size, mask=tokens < end_token, other=0)
    return pages


# The number of shares is no constant: one compiled kernel serves captured steps of all sizes.
@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _share_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    page_table,
    lengths,
    partial,
    sums,
    scale,
    query_sequence_stride,
    query_head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    partial_sequence_stride,
    partial_head_stride,
    partial_split_stride,
    splits,
    head_dim: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    share_blocks: tl.constexpr,
    least_blocks: tl.constexpr,
    whole: tl.constexpr,
    rows: tl.constexpr,
    dims: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
):
    await_predecessor(chained)
    kv_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence)
    first, _, share = _blocks(length, splits, window, share_blocks, least_blocks, block)
    start_token = (first + split * share) * block
    end_token = tl.minimum((first + (split + 1) * share) * block, length)

    row = tl.arange(0, rows)
    dim = tl.arange(0, dims)
    heads = kv_head * group + row
    row_mask = (row[:, None] < group) & (dim[None, :] < head_dim)
    target = partial + sequence * partial_sequence_stride + heads[:, None] * partial_head_stride + split * partial_split_stride + dim[None, :]
    if start_token >= end_token:
        if whole:
            tl.store(target, tl.zeros((rows, dims), partial.dtype.element_ty), mask=row_mask)
        return

    table = page_table + sequence * table_stride
    q = tl.load(query + sequence * query_sequence_stride + heads[:, None] * query_head_stride + dim[None, :], mask=row_mask, other=0.0)
    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mixed = tl.zeros((rows, dims), tl.float32)
    lane = tl.arange(0, block)
    # A block's pages are looked up one round ahead, so that the loads of keys and values do not wait for them.
    pages = pages_of(table, start_token + lane, start_token, end_token, page_size, block)
    for start in range(start_token, end_token, block):
        tokens = start + lane
        there = tokens < end_token
        places = pages.to(tl.int64) * page_stride + (tokens % page_size) * token_stride + kv_head * kv_head_stride
        pages = pages_of(table, tokens + block, start + block, end_token, page_size, block)
        block_mask = there[:, None] if head_dim == dims else there[:, None] & (dim[None, :] < head_dim)
        k = tl.load(keys + places[:, None] + dim[None, :], mask=block_mask, other=0.0)
        v = tl.load(values + places[:, None] + dim[None, :], mask=block_mask, other=0.0)
        # "ieee": float32 products are not rounded to tf32.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = there
        if window > 0:
            seen = there & (tokens >= length - window)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    tl.store(target, (mixed / total[:, None]).to(partial.dtype.element_ty), mask=row_mask)
    if not whole:
        rows_of_sums = (sequence * tl.num_programs(0) * group + heads) * splits + split
        tl.store(sums + rows_of_sums, best + tl.log2(total), mask=row < group)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    partial,
    sums,
    lengths,
    output,
    output_sequence_stride,
    output_head_stride,
    splits,
    head_dim: tl.constexpr,
    window: tl.constexpr,
    share_blocks: tl.constexpr,
    least_blocks: tl.constexpr,
    block: tl.constexpr,
    dims: tl.constexpr,
    tile: tl.constexpr,
    chained: tl.constexpr,
):
    await_predecessor(chained)
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    first, end, share = _blocks(length, splits, window, share_blocks, least_blocks, block)
    used = (end - first + share - 1) // share
    row = (sequence * tl.num_programs(1) + head) * splits
    lane = tl.arange(0, tile)
    dim = tl.arange(0, dims)
    best = tl.full((tile,), float("-inf"), tl.float32)
    for start in range(0, used, tile):
        best = tl.maximum(best, tl.load(sums + row + start + lane, mask=start + lane < used, other=float("-inf")))
    largest = tl.max(best, axis=0)
    total = 0.0
    mixed = tl.zeros((dims,), tl.float32)
    for start in range(0, used, tile):
        there = start + lane < used
        weights = tl.exp2(tl.load(sums + row + start + lane, mask=there, other=float("-inf")) - largest)
        parts = partial + (row + start + lane[:, None]) * head_dim + dim[None, :]
        shares = tl.load(parts, mask=there[:, None] & (dim[None, :] < head_dim), other=0.0)
        total += tl.sum(weights, axis=0)
        mixed += tl.sum(shares * weights[:, None], axis=0)
    # A padding row has no share: zeros, not 0 / 0.
    result = mixed / tl.where(used > 0, total, 1.0)
    tl.store(output + sequence * output_sequence_stride + head * output_head_stride + dim, result.to(output.dtype.element_ty), mask=dim < head_dim)
