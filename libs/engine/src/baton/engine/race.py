"""Drawing by a race: every token has a random time of arrival, divided by its probability, and the first to arrive is drawn.

With independent exponential times that is a draw from the distribution, whatever its scale (the "exponential race", or Gumbel-max in logarithms).
What makes it the right one here: logits that differ in the last bits, because another batch or another server computed them, change the token only
where two arrivals are as close as that. The inverse of a cumulative distribution over a vocabulary of tens of thousands has as many edges, each of
which moves with the rounding of all weights before it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

#: As signed 32-bit numbers: the golden ratio's odd fraction, and the multipliers of MurmurHash3's 32-bit finaliser.
_STRIDE, _FIRST, _SECOND = -1640531527, -2048144789, -1028477387
_ALMOST_ONE = 1 - 2.0**-24


def arrivals(key: tuple[int, int], num_tokens: int) -> Tensor:
    """[num_tokens] float32: exponentially distributed numbers above 0, functions of the key (two 32-bit words) and the token alone."""
    first, second = (_signed(word) for word in key)
    mixed = _strides(num_tokens) + first
    mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    mixed.bitwise_xor_((mixed >> 13).bitwise_and_(0x7FFFF)).bitwise_xor_(second).mul_(_SECOND)
    mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF))
    # Minus a number in (0, 1): as many bits near 0, where the early arrivals are, as float32 has.
    part = mixed.float().mul_(-(2.0**-32)).sub_(2.0**-33)
    part.sub_(part.gt(0).float())
    return part.clamp_(min=-_ALMOST_ONE).log1p_().neg_()


@lru_cache(maxsize=4)
def _strides(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens, dtype=torch.int32).mul_(_STRIDE)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
