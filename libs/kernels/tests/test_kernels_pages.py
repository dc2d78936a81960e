"""Pages in and out of a pool, and their digest."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, random

from baton.kernels import (
    gather_heads,
    gather_pages,
    naive_gather_heads,
    naive_gather_pages,
    naive_page_digest,
    naive_scatter_heads,
    naive_scatter_pages,
    page_digest,
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


def digest_in_python(data):
    mask = (1 << 64) - 1

    def mix(word):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    total = sum(mix(word ^ ((place + 1) * 0x9E3779B97F4A7C15 & mask)) for place, word in enumerate(words))
    final = mix((total + len(data)) & mask)
    return final - (1 << 64) if final >> 63 else final


@pytest.mark.parametrize("num_bytes", [8, 72, 16384])
def test_the_digest_is_that_of_its_definition(num_bytes):
    pool = torch.randint(0, 256, (4, num_bytes), generator=torch.Generator().manual_seed(5)).to(DEVICE, torch.uint8)
    index = index_of(3, 0, 3)
    digests = page_digest(pool, index)
    assert torch.equal(digests, naive_page_digest(pool, index))
    assert digests.tolist() == [digest_in_python(bytes(pool[page].tolist())) for page in (3, 0, 3)]


def test_the_digest_sees_words_that_change_places_and_single_bits():
    pool = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(5)).to(DEVICE, torch.uint8)
    pool[1] = torch.cat((pool[0, 8:16], pool[0, :8], pool[0, 16:]))
    pool[2] = pool[0].roll(8)
    pool[3] = pool[0]
    pool[3, 63] ^= 128
    assert len(set(page_digest(pool, index_of(0, 1, 2, 3)).tolist())) == 4


def test_what_does_not_fit_is_refused():
    pool = random(4, 16, 4, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="heads 3 to 5"):
        gather_heads(pool, index_of(0), 3, 2)
    with pytest.raises(ValueError, match=r"index is torch\.int64"):
        gather_heads(pool, index_of(0).long(), 0, 2)
    with pytest.raises(ValueError, match="source has shape"):
        scatter_pages(pool.flatten(1), index_of(0, 1), pool.flatten(1)[:1])
    with pytest.raises(ValueError, match="multiple of 8"):
        page_digest(torch.zeros(2, 12, dtype=torch.uint8, device=DEVICE), index_of(0))
