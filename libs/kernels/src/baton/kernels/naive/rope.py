"""Norm and rotation of queries and keys, and the write of keys and values into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.naive.norm import naive_rms_norm


def naive_rope_and_write(
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
    """What lies between the projection of a layer and its attention, in place.

    qkv [n, (heads + 2 kv heads) * head dim]: a row's query heads, key heads and value heads. Query and key heads are normed (q_norm, k_norm
    [head dim]; None: not), then rotated: dimensions 2i and 2i + 1 together, by turns[position] [head dim] float32, which holds the cosine of
    pair i at 2i and its sine at 2i + 1. positions [n] int64. Keys and values then go to slots [n] int64 of keys, values
    [pages, page size, kv heads, head dim], slot = page * page size + offset; a row whose slot is negative is rotated and not written.
    """
    head_dim = keys.shape[3]
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), dim=1)
    cosine, sine = (each.unsqueeze(1) for each in turns[positions].view(len(qkv), head_dim // 2, 2).unbind(-1))
    for part, weight in ((query, q_norm), (key, k_norm)):
        even, odd = (part if weight is None else naive_rms_norm(part, weight, eps)).float().reshape(*part.shape[:-1], -1, 2).unbind(-1)
        part.copy_(torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2))
    page, offset = slots // keys.shape[1], slots % keys.shape[1]
    there = slots >= 0
    keys[page[there], offset[there]] = key[there].to(keys.dtype)
    values[page[there], offset[there]] = value[there].to(values.dtype)
