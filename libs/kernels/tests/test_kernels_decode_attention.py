"""Paged decode attention against its naive twin: awkward shapes, scattered pages, everything unused poisoned with NaN."""

from __future__ import annotations

import pytest
import torch

import baton.kernels
from baton.kernels import decode_attention, naive_decode_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (heads, kv heads, head dim, page size, lengths)
SHAPES = [
    (9, 3, 64, 16, [1, 15, 16, 17, 63, 500]),
    (4, 4, 32, 1, [1, 2, 65]),
    (8, 1, 128, 16, [129, 64]),
    (6, 2, 80, 5, [37, 1, 100]),
    (32, 8, 128, 16, [33]),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
if DEVICE == "cuda":
    # The interpreter computes in numpy, which has no bfloat16.
    TOLERANCE[torch.bfloat16] = 1.6e-2


def scattered(num_heads, num_kv_heads, head_dim, page_size, lengths, dtype):
    """Pages in random order; slots behind a sequence's length, unused pages and the table's tail hold what must not be read."""
    generator = torch.Generator().manual_seed(num_heads * head_dim)
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    keys = torch.full((num_pages, page_size, num_kv_heads, head_dim), float("nan"))
    values = keys.clone()
    table = torch.full((len(lengths), max(counts) + 2), 2**30, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for index in range(count):
            page = order.pop()
            table[row, index] = page
            used = min(page_size, length - index * page_size)
            keys[page, :used] = torch.randn(used, num_kv_heads, head_dim, generator=generator)
            values[page, :used] = torch.randn(used, num_kv_heads, head_dim, generator=generator)
    query = torch.randn(len(lengths), num_heads, head_dim, generator=generator)
    tensors = [tensor.to(DEVICE, dtype) for tensor in (query, keys, values)]
    return (*tensors, table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_its_naive_twin(shape, dtype, monkeypatch):
    arguments = scattered(*shape, dtype)
    poisoned = torch.full_like(arguments[0], float("nan"))
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: poisoned)
    result = decode_attention(*arguments)
    monkeypatch.undo()
    assert result is poisoned
    expected = naive_decode_attention(*(each.float() if each.is_floating_point() else each for each in arguments))
    assert result.isfinite().all(), "a slot that nobody wrote was read, or one of the output was not written"
    torch.testing.assert_close(result.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_naive_twin_is_torch_attention_on_one_run_of_pages():
    query, keys, values, table, lengths = scattered(6, 2, 32, 4, [30], torch.float32)
    pages = table[0, :8].long()
    flat_keys, flat_values = (each[pages].reshape(-1, 2, 32)[:30].transpose(0, 1).unsqueeze(0) for each in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(query.view(1, 6, 1, 32), flat_keys, flat_values, enable_gqa=True)
    torch.testing.assert_close(naive_decode_attention(query, keys, values, table, lengths), expected.view(1, 6, 32), atol=2e-6, rtol=2e-6)


def test_a_scale_of_ones_own():
    arguments = scattered(6, 2, 32, 4, [30, 9], torch.float32)
    torch.testing.assert_close(decode_attention(*arguments, scale=0.5), naive_decode_attention(*arguments, scale=0.5), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("place", "shape"), [(0, (2, 5, 32)), (1, (9, 4, 2, 16)), (4, (3,)), (3, (1, 4))])
def test_shapes_that_do_not_fit_are_refused(place, shape):
    arguments = list(scattered(6, 2, 32, 4, [30, 9], torch.float32))
    arguments[place] = torch.zeros(shape, dtype=arguments[place].dtype, device=DEVICE)
    with pytest.raises(ValueError, match=r"query|sequences"):
        decode_attention(*arguments)


def test_the_face_of_the_package():
    for name in baton.kernels.__all__:
        assert callable(getattr(baton.kernels, name))
