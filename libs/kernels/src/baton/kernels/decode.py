"""Paged decode attention in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Tokens a program looks at in one go, and the least rows that tl.dot takes.
BLOCK_TOKENS = 64
MIN_ROWS = 16


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, lengths: Tensor, scale: float | None = None) -> Tensor:
    """`naive_decode_attention` as one launch: a program for each sequence and KV head, online softmax over blocks of tokens.

    Same arguments and result; float32, float16 or bfloat16, accumulated in float32. The last dimension of query, keys and values must be
    contiguous. Raises ValueError when shapes do not fit together.
    """
    num_sequences, num_heads, head_dim = query.shape
    _, page_size, num_kv_heads, _ = keys.shape
    if keys.shape != values.shape or keys.shape[3] != head_dim or num_heads % num_kv_heads:
        raise ValueError(f"query {list(query.shape)}, keys {list(keys.shape)} and values {list(values.shape)} do not fit together")
    if keys.stride() != values.stride() or keys.stride(3) != 1 or query.stride(2) != 1:
        raise ValueError("keys and values must have the same strides, and the last dimension of all must be contiguous")
    if page_table.shape[0] != num_sequences or lengths.shape != (num_sequences,):
        raise ValueError(f"page_table {list(page_table.shape)} and lengths {list(lengths.shape)} are not of {num_sequences} sequences")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    group = num_heads // num_kv_heads
    _decode_attention_kernel[(num_sequences, num_kv_heads)](
        query,
        keys,
        values,
        page_table,
        lengths,
        output,
        head_dim**-0.5 if scale is None else scale,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        page_table.stride(0),
        output.stride(0),
        output.stride(1),
        head_dim,
        group,
        page_size,
        rows=max(MIN_ROWS, triton.next_power_of_2(group)),
        dims=max(MIN_ROWS, triton.next_power_of_2(head_dim)),
        block=BLOCK_TOKENS,
    )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _decode_attention_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    page_table,
    lengths,
    output,
    scale,
    query_sequence_stride,
    query_head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    output_sequence_stride,
    output_head_stride,
    head_dim,
    group,
    page_size,
    rows: tl.constexpr,
    dims: tl.constexpr,
    block: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)

    row = tl.arange(0, rows)
    dim = tl.arange(0, dims)
    heads = kv_head * group + row
    row_mask = (row[:, None] < group) & (dim[None, :] < head_dim)
    q = tl.load(query + sequence * query_sequence_stride + heads[:, None] * query_head_stride + dim[None, :], mask=row_mask, other=0.0)

    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mixed = tl.zeros((rows, dims), tl.float32)
    for start in range(0, length, block):
        tokens = start + tl.arange(0, block)
        there = tokens < length
        pages = tl.load(page_table + sequence * table_stride + tokens // page_size, mask=there, other=0).to(tl.int64)
        places = pages * page_stride + (tokens % page_size) * token_stride + kv_head * kv_head_stride
        block_mask = there[:, None] & (dim[None, :] < head_dim)
        k = tl.load(keys + places[:, None] + dim[None, :], mask=block_mask, other=0.0)
        v = tl.load(values + places[:, None] + dim[None, :], mask=block_mask, other=0.0)
        # "ieee": float32 products are not rounded to tf32.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    result = (mixed / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + sequence * output_sequence_stride + heads[:, None] * output_head_stride + dim[None, :], result, mask=row_mask)
