"""Norm and rotation of queries and keys fused with the write of keys and values into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.dispatch import FLOATS, expect, expect_dense, expect_pages, power_of_two, runs_triton
from baton.kernels.limits import MAX_PAGE_SIZE
from baton.kernels.naive import naive_rope_and_write


def rope_and_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    turns: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """As `naive_rope_and_write`: updates qkv in place and writes one layer's pages. qkv may be strided over rows. Raises ValueError.

    positions and slots are not checked: a position beyond turns or a slot beyond the pages is memory of somebody else.
    """
    head_dim = keys.shape[3]
    expect_pages(keys, values, head_dim)
    expect("qkv", qkv, (-1, (num_heads + 2 * num_kv_heads) * head_dim), keys.dtype)
    expect_dense("qkv", qkv)
    expect("positions", positions, (len(qkv),), torch.int64)
    expect("slots", slots, (len(qkv),), torch.int64)
    expect("turns", turns, (-1, head_dim), torch.float32)
    expect_dense("turns", turns, 2)
    if keys.shape[2] != num_kv_heads:
        raise ValueError(f"keys have {keys.shape[2]} heads; num_kv_heads = {num_kv_heads}")
    if head_dim % 2:
        raise ValueError(f"keys have a head dimension of {head_dim}; it must be even")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            expect(name, weight, (head_dim,), FLOATS)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given both or neither")
    if not runs_triton(qkv):
        naive_rope_and_write(qkv, positions, slots, turns, keys, values, num_heads, num_kv_heads, q_norm, k_norm, eps)
        return
    power_of_two("page size", keys.shape[1], MAX_PAGE_SIZE)
    from baton.kernels.device.rope import launch_rope_and_write

    launch_rope_and_write(qkv, positions, slots, turns, keys, values, num_heads, num_kv_heads, q_norm, k_norm, eps)
