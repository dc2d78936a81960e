"""What the tests of kernels share: the device, tolerances, and sequences in scattered pages whose every unowned number is NaN."""

from __future__ import annotations

import os

import torch

#: cpu (Triton's interpreter) or cuda.
DEVICE = os.environ.get("BATON_KERNELS_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")

#: How far a kernel may be from its twin. The interpreter computes in numpy, which has no bfloat16.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}
if DEVICE == "cuda":
    # float32 there: other exponentials, and torch's own products as the reference.
    TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(result, expected, dtype, times=1):
    torch.testing.assert_close(result.float(), expected.float(), atol=times * TOLERANCE[dtype], rtol=times * TOLERANCE[dtype])


def random(*shape, dtype, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def strided(tensor):
    """The same numbers as a view of wider rows, with NaN beside them."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 24), float("nan"), dtype=tensor.dtype, device=tensor.device)
    wide[:, 8 : 8 + tensor.shape[1]] = tensor
    return wide[:, 8 : 8 + tensor.shape[1]]


def scattered(lengths, page_size, num_kv_heads, head_dim, dtype, seed=7):
    """keys, values, page_table, lengths. Pages in random order; unused slots and pages are NaN, the table's unused part an absurd number."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    keys = torch.full((num_pages, page_size, num_kv_heads, head_dim), float("nan"))
    values = keys.clone()
    table = torch.full((len(lengths), max(counts, default=0) + 2), 2**30, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for index in range(count):
            page = order.pop()
            table[row, index] = page
            used = min(page_size, length - index * page_size)
            keys[page, :used] = torch.randn(used, num_kv_heads, head_dim, generator=generator)
            values[page, :used] = torch.randn(used, num_kv_heads, head_dim, generator=generator)
    return keys.to(DEVICE, dtype), values.to(DEVICE, dtype), table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
