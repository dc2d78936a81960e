"""Philox4x32-10 in Triton: the engine's random numbers, keyed by (seed, position)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def draw_key(seed, position):  # type: ignore[no-untyped-def]
    """Two words as int32; seed, position int64."""
    mask = tl.full((), 0xFFFFFFFF, tl.uint64)
    counter = position.to(tl.uint64, bitcast=True)
    key = seed.to(tl.uint64, bitcast=True)
    c0 = counter & mask
    c1 = counter >> 32
    c2 = c0 * 0
    c3 = c0 * 0
    k0 = key & mask
    k1 = key >> 32
    for _ in tl.static_range(10):
        left = c0 * 0xD2511F53
        right = c2 * 0xCD9E8D57
        c0 = (right >> 32) ^ c1 ^ k0
        c1 = right & mask
        c2 = (left >> 32) ^ c3 ^ k1
        c3 = left & mask
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    return c0.to(tl.uint32).to(tl.int32, bitcast=True), c1.to(tl.uint32).to(tl.int32, bitcast=True)
