"""Draws tokens: the rule of the engine's sampler, as sorts and sums in float64."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def naive_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    forbidden: Tensor | None = None,
) -> Tensor:
    """A token a row, [n] int64; -1 where a row's largest logit is not finite or one of them is NaN. logits [n, vocabulary] are left as they are.

    temperature, top_p, min_p [n] float32, top_k [n] int32, seed, position [n] int64; forbidden [n, f] int32: tokens that row may not take, -1
    is none. Temperature 0 takes the largest logit (the lowest id among equals). Otherwise: temperature, top_k, top_p, min_p in that order (0, 1
    and 0 are off), then the largest of probability over `naive_arrivals(seed, position)`. A filter keeps every token as probable as the last
    one it keeps.
    """
    if forbidden is not None:
        logits = logits.clone()
        for row, tokens in zip(logits, forbidden.tolist(), strict=True):
            row[[token for token in tokens if 0 <= token < logits.shape[1]]] = float("-inf")
    wide = logits.float()
    best, greedy = wide.max(dim=-1).values, _first_largest(wide)
    drawn = torch.where(best.isfinite(), greedy, torch.full_like(greedy, -1))
    arrivals = naive_arrivals(seed, position, logits.shape[1])
    for row in ((temperature > 0) & (drawn >= 0)).nonzero().flatten().tolist():
        scaled = (wide[row] - best[row]) / temperature[row]
        weights = scaled.exp()
        keep = scaled >= _edge(scaled, weights, int(top_k[row]), float(top_p[row]), float(min_p[row]))
        drawn[row] = _first_largest((torch.where(keep, weights, 0) / arrivals[row])[None])[0]
    return drawn


def naive_arrivals(seed: Tensor, position: Tensor, num_tokens: int) -> Tensor:
    """[n, num_tokens] float32: exponentially distributed, a function of seed, position (both [n] int64) and the token alone.

    The first two words of Philox4x32-10 of the counter `position` and the key `seed` enter MurmurHash3's finaliser of the token's number, one
    before it and one in its middle.
    """
    first, second = (word[:, None] for word in naive_draw_key(seed, position))
    mixed = (torch.arange(num_tokens, device=seed.device) * 0x9E3779B9 + first) & _MASK
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B & _MASK
    mixed = (mixed ^ (mixed >> 13) ^ second) * 0xC2B2AE35 & _MASK
    mixed = mixed ^ (mixed >> 16)
    # As a signed number: half of them get their one back, and those near zero keep all their bits.
    part = torch.where(mixed >> 31 == 1, mixed - (1 << 32), mixed).float() * 2.0**-32 + 2.0**-33
    part = torch.where(part < 0, part + 1, part).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-part)


def naive_draw_key(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Two words, [n] int64 in [0, 2**32), of Philox4x32-10 of the counter `position` and the key `seed`, both [n] int64."""
    c0, c1 = position & _MASK, (position >> 32) & _MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # A product of two 32-bit numbers may not fit into int64's 63 bits, but its bits are right.
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((right >> 32) & _MASK) ^ c1 ^ k0, right & _MASK, ((left >> 32) & _MASK) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1


def _first_largest(wide: Tensor) -> Tensor:
    """The lowest id among equals; torch.argmax promises none in particular."""
    ids = torch.arange(wide.shape[1], device=wide.device)
    return torch.where(wide == wide.max(dim=-1, keepdim=True).values, ids, wide.shape[1] - 1).min(dim=-1).values


def _edge(scaled: Tensor, weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The least scaled logit that all filters keep."""
    edge = torch.full((), float("-inf"), device=scaled.device)
    if 0 < top_k < len(scaled):
        edge = scaled.topk(top_k).values[-1]
    if top_p < 1:
        ordered, order = scaled[scaled >= edge].sort(descending=True)
        mass = weights[scaled >= edge][order].double().cumsum(dim=0)
        edge = ordered[min(int(torch.searchsorted(mass, mass[-1] * top_p)), len(ordered) - 1)]
    if min_p > 0:
        edge = torch.maximum(edge, torch.tensor(min_p, dtype=torch.float64, device=scaled.device).log().float())
    return edge
