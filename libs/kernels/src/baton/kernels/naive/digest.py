"""A 64-bit digest of pages' bytes."""

from __future__ import annotations

import torch
from torch import Tensor

#: Odd constants with well-spread bits (the golden ratio's, and the multipliers of the splitmix64 finaliser), as signed numbers.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)
HALF = (1 << 32) - 1


def naive_page_digest(pool: Tensor, index: Tensor, state: Tensor, planes: range, pages: range) -> None:
    """pool [planes, pages, tokens, token bytes] uint8 (8 | token bytes), index [m] int32, state [1 + planes * m] int64, zeros before the first call.

    Adds pages index[pages] of `planes` to `state`. Each 8-byte word of a page is xored with a multiple of an odd constant, another one at each place;
    the product of the two halves and the word itself are added up modulo 2^64, and the sum with the number of bytes is mixed by multiplications and
    shifts: the page's digest. That is mixed with its place among all planes' m pages, plane by plane: the page's term, in state[1 + place]. state[0]
    is the sum of all terms, of which `whole_digest` makes the digest of all pages. A page that is added again counts as it is then. Words or pages
    that change places change the digest; it is no protection against an adversary.
    """
    chosen = pool[planes.start : planes.stop, index[pages.start : pages.stop].long()]
    words = chosen.flatten(2).contiguous().view(torch.int64)
    number = torch.arange(1, words.shape[2] + 1, device=pool.device)
    salted = words ^ number * STEP
    digests = _mix((words + (salted & HALF) * _shifted(salted, 32)).sum(dim=2) + words.shape[2] * 8)
    place = torch.arange(1, len(state), device=pool.device).view(len(pool), len(index))[planes.start : planes.stop, pages.start : pages.stop]
    terms = _mix(digests ^ place * STEP)
    held = state[1:].view(len(pool), len(index))[planes.start : planes.stop, pages.start : pages.stop]
    state[:1] += (terms - held).sum()
    held.copy_(terms)


def _mix(word: Tensor) -> Tensor:
    word = (word ^ _shifted(word, 30)) * FIRST
    word = (word ^ _shifted(word, 27)) * SECOND
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Shifted right without the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
