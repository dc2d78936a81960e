"""What the kernels compute, written as plainly as torch allows: the reference of their tests and of the engine's."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_decode_attention(query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, lengths: Tensor, scale: float | None = None) -> Tensor:
    """One query a sequence against its paged keys and values.

    query [sequences, heads, head dim]; keys, values [pages, page size, kv heads, head dim], heads a multiple of kv heads;
    page_table [sequences, max pages] int32, the sequence's pages in order (what lies behind its length is not read);
    lengths [sequences] int32, tokens of each sequence, at least 1. scale: of the scores; None is 1 / sqrt(head dim).
    Returns [sequences, heads, head dim] in query's dtype; computed in float32.
    """
    num_sequences, num_heads, head_dim = query.shape
    page_size, num_kv_heads = keys.shape[1], keys.shape[2]
    factor = head_dim**-0.5 if scale is None else scale
    output = torch.empty_like(query)
    for sequence in range(num_sequences):
        length = int(lengths[sequence])
        pages = page_table[sequence, : -(-length // page_size)].long()
        sequence_keys = keys[pages].reshape(-1, num_kv_heads, head_dim)[:length].float()
        sequence_values = values[pages].reshape(-1, num_kv_heads, head_dim)[:length].float()
        grouped = query[sequence].float().view(num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("kgd,tkd->kgt", grouped, sequence_keys) * factor
        mixed = torch.einsum("kgt,tkd->kgd", scores.softmax(dim=-1), sequence_values)
        output[sequence] = mixed.reshape(num_heads, head_dim).to(query.dtype)
    return output
