"""Pages in and out of a pool."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, random

from baton.kernels import (
    gather_heads,
    gather_pages,
    naive_gather_heads,
    naive_gather_pages,
    naive_scatter_heads,
    naive_scatter_pages,
    scatter_heads,
    scatter_pages,
)


def index_of(*pages):
    return torch.tensor(pages, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.uint8], ids=str)
@pytest.mark.parametrize("elements", [8, 1000, 5000])
def test_whole_pages(elements, dtype):
    pool, index = random(6, elements, dtype=dtype), index_of(4, 0, 5)
    packed = gather_pages(pool, index)
    assert torch.equal(packed, naive_gather_pages(pool, index))
    assert torch.equal(packed, torch.stack([pool[4], pool[0], pool[5]]))
    ours, theirs = torch.zeros_like(pool), torch.zeros_like(pool)
    scatter_pages(ours, index, packed)
    naive_scatter_pages(theirs, index, packed)
    assert torch.equal(ours, theirs)
    assert not ours[[1, 2, 3]].any()
    assert gather_pages(pool, index_of()).shape == (0, elements)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 2), (3, 1), (0, 4)])
def test_some_heads_of_pages(first, count, dtype):
    pool, index = random(5, 16, 4, 80, dtype=dtype), index_of(3, 1)
    packed = gather_heads(pool, index, first, count)
    assert torch.equal(packed, naive_gather_heads(pool, index, first, count))
    ours, theirs = torch.zeros_like(pool), torch.zeros_like(pool)
    scatter_heads(ours, index, packed, first)
    naive_scatter_heads(theirs, index, packed, first)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[3, :, first : first + count], pool[3, :, first : first + count])


def test_two_halves_make_the_pages_of_a_lesser_degree():
    whole, index = random(5, 16, 4, 64, dtype=torch.float32), index_of(2, 4)
    joined = torch.zeros_like(whole)
    for rank in range(2):
        scatter_heads(joined, index, gather_heads(whole, index, 2 * rank, 2), 2 * rank)
    assert torch.equal(joined[[2, 4]], whole[[2, 4]])


def test_what_does_not_fit_is_refused():
    pool = random(4, 16, 4, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="heads 3 to 5"):
        gather_heads(pool, index_of(0), 3, 2)
    with pytest.raises(ValueError, match=r"index is torch\.int64"):
        gather_heads(pool, index_of(0).long(), 0, 2)
    with pytest.raises(ValueError, match="source has shape"):
        scatter_pages(pool.flatten(1), index_of(0, 1), pool.flatten(1)[:1])
