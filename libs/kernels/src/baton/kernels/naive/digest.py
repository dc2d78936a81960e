"""A 64-bit digest of a page's bytes."""

from __future__ import annotations

import torch
from torch import Tensor

#: Odd constants with well-spread bits (the golden ratio's, and the multipliers of the splitmix64 finaliser), as signed numbers.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)


def naive_page_digest(pool: Tensor, index: Tensor) -> Tensor:
    """pool [pages, page bytes] uint8 (8 | page bytes), index [m] int32 -> [m] int64.

    Each 8-byte word is mixed with its place by xor, multiplication and shifts; the mixed words are added up modulo 2^64 and mixed again with
    their number. Words that change places, or a run that moves, change the digest; it is no protection against an adversary.
    """
    words = pool[index.long()].view(torch.int64)
    places = torch.arange(1, words.shape[1] + 1, device=pool.device) * STEP
    return _mix(_mix(words ^ places).sum(dim=1) + words.shape[1] * 8)


def _mix(word: Tensor) -> Tensor:
    word = (word ^ _shifted(word, 30)) * FIRST
    word = (word ^ _shifted(word, 27)) * SECOND
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Shifted right without the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
