"""The digest of pages: its definition, a part at a time, of some heads."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE

from baton.kernels import naive_page_digest, page_digest, whole_digest

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def bytes_of(*shape, seed=5):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.uint8)


def index_of(*pages):
    return torch.tensor(pages, dtype=torch.int32, device=DEVICE)


def zeros(pool, index):
    return torch.zeros(1 + len(pool) * len(index), dtype=torch.int64, device=DEVICE)


def digest(pool, *pages, by=page_digest):
    index = index_of(*pages)
    state = zeros(pool, index)
    by(pool, index, state, range(len(pool)), range(len(index)))
    return whole_digest(int(state[0]), len(state) - 1)


def mix(word):
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def page_in_python(words):
    total = 0
    for place, word in enumerate(words):
        salted = word ^ ((place + 1) * STEP & MASK)
        total += word + (salted % (1 << 32)) * (salted >> 32)
    return mix((total + 8 * len(words)) & MASK)


def digest_in_python(pool, *pages):
    """Of the digests of the pages, plane by plane."""
    each = [bytes(plane[page].flatten().tolist()) for plane in pool.cpu() for page in pages]
    digests = [page_in_python([int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]) for data in each]
    return mix((sum(mix(word ^ ((place + 1) * STEP & MASK)) for place, word in enumerate(digests)) + 8 * len(digests)) & MASK)


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (3, 24), (4, 4096)])
def test_the_digest_is_that_of_its_definition(tokens, width):
    pool = bytes_of(2, 5, tokens, width)
    assert digest(pool, 3, 0, 3) == digest(pool, 3, 0, 3, by=naive_page_digest) == digest_in_python(pool, 3, 0, 3)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("width", [8, 1000])
def test_some_heads_have_the_digest_of_a_pool_that_has_no_others(first, count, width):
    pool = bytes_of(2, 4, 3, 3, width)
    some = pool[..., first : first + count, :].flatten(3)
    alone = some.contiguous()
    assert digest(some, 2, 1) == digest(alone, 2, 1) == digest(some, 2, 1, by=naive_page_digest) == digest_in_python(alone, 2, 1)


def test_parts_in_any_order_make_the_whole_and_what_comes_again_counts_as_it_is_then():
    pool, index = bytes_of(3, 6, 2, 16), index_of(5, 1, 2, 0)
    states = {}
    for by in (page_digest, naive_page_digest):
        state = states[by] = zeros(pool, index)
        pool[:, 1] ^= 255
        by(pool, index, state, range(1, 3), range(2))
        pool[:, 1] ^= 255
        by(pool, index, state, range(1), range(4))
        by(pool, index, state, range(1, 3), range(1, 4))
        by(pool, index, state, range(2, 2), range(4))
        by(pool, index, state, range(3), range(3, 3))
        assert whole_digest(int(state[0]), 12) == digest(pool, 5, 1, 2, 0)
    assert torch.equal(*states.values())


def test_words_and_pages_that_change_places_and_single_bits_are_seen():
    pool = bytes_of(1, 4, 1, 64)
    pool[0, 1] = torch.cat((pool[0, 0, :, 8:16], pool[0, 0, :, :8], pool[0, 0, :, 16:]), dim=1)
    pool[0, 2] = pool[0, 0].roll(8, 1)
    pool[0, 3] = pool[0, 0]
    pool[0, 3, 0, 63] ^= 128
    assert len({digest(pool, page) for page in range(4)} | {digest(pool, 0, 1), digest(pool, 1, 0)}) == 6
    assert digest(torch.cat((pool, pool.roll(1, 1))), 0) != digest(torch.cat((pool.roll(1, 1), pool)), 0)


def test_what_does_not_fit_is_refused():
    pool, index = bytes_of(2, 4, 3, 16), index_of(0, 1)
    state = zeros(pool, index)
    with pytest.raises(ValueError, match="multiples of 8"):
        page_digest(bytes_of(2, 4, 3, 12), index, state, range(2), range(2))
    with pytest.raises(ValueError, match="state has shape"):
        page_digest(pool, index, state[1:], range(2), range(2))
    for planes, pages in ((range(3), range(2)), (range(2), range(1, 3)), (range(0, 2, 2), range(2)), (range(2), range(-1, 2))):
        with pytest.raises(ValueError, match="consecutive numbers from 0 to 2"):
            page_digest(pool, index, state, planes, pages)
