"""Norm, rotation and page write of a layer's queries, keys and values: a program for some heads of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import await_predecessor

HEADS = 8


def launch_rope_and_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    turns: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    num_rows, head_dim = len(qkv), keys.shape[3]
    if num_rows == 0:
        return
    _rope_kernel[(num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))](
        qkv,
        positions,
        slots,
        turns,
        keys,
        values,
        turns if q_norm is None else q_norm,
        turns if k_norm is None else k_norm,
        eps,
        qkv.stride(0),
        positions.stride(0),
        slots.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=keys.shape[1],
        normed=q_norm is not None,
        heads=HEADS,
        dims=triton.next_power_of_2(head_dim),
        chained=is_chained(),
        launch_pdl=is_chained(),
        num_warps=4 if head_dim > 64 else 2,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rope_kernel(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    slots,
    turns,
    keys,
    values,
    q_norm,
    k_norm,
    eps,
    row_stride,
    position_stride,
    slot_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    normed: tl.constexpr,
    heads: tl.constexpr,
    dims: tl.constexpr,
    chained: tl.constexpr,
):
    await_predecessor(chained)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    dim = tl.arange(0, dims)
    is_query = head < num_heads
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)
    is_value = head >= num_heads + num_kv_heads
    inside = (head < num_heads + 2 * num_kv_heads)[:, None] & (dim < head_dim)[None, :]
    places = qkv + row * row_stride + head[:, None] * head_dim + dim[None, :]
    value = tl.load(places, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    if normed:
        factor = tl.rsqrt(tl.sum(wide * wide, axis=1) / head_dim + eps)
        of_query = tl.load(q_norm + dim, mask=dim < head_dim, other=0.0).to(tl.float32)
        of_key = tl.load(k_norm + dim, mask=dim < head_dim, other=0.0).to(tl.float32)
        weight = tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
        # Rounded where torch rounds: after the norm, and after the product with the weight.
        wide = ((wide * factor[:, None]).to(value.dtype).to(tl.float32) * weight).to(value.dtype).to(tl.float32)
    position = tl.load(positions + row * position_stride)
    turn = tl.load(turns + position * head_dim + dim, mask=dim < head_dim, other=0.0)
    cosine, sine = tl.split(tl.reshape(turn, (1, dims // 2, 2)))
    even, odd = tl.split(tl.reshape(wide, (heads, dims // 2, 2)))
    rotated = tl.reshape(tl.join(even * cosine - odd * sine, even * sine + odd * cosine), (heads, dims)).to(value.dtype)
    tl.store(places, rotated, mask=inside & (head < num_heads + num_kv_heads)[:, None])

    slot = tl.load(slots + row * slot_stride)
    # A padding row's slot is negative; what it points at is never touched.
    owned = inside & (slot + head * 0 >= 0)[:, None]
    target = (slot // page_size) * page_stride + (slot % page_size) * token_stride
    key_head = head - num_heads
    tl.store(keys + target + key_head[:, None] * kv_head_stride + dim[None, :], rotated, mask=owned & is_key[:, None])
    value_head = key_head - num_kv_heads
    tl.store(values + target + value_head[:, None] * kv_head_stride + dim[None, :], value, mask=owned & is_value[:, None])
