"""The digest of pages: one program reads a page of a plane and adds its term to the sum."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, int64

DIGEST_BLOCK = 1024
STEP = tl.constexpr(0x9E3779B97F4A7C15)


def launch_digest(pool: Tensor, index: Tensor, state: Tensor, planes: range, pages: range) -> None:
    words = pool.view(int64)
    _, _, tokens, run = words.shape
    if words.stride(2) == run:
        tokens, run = 1, tokens * run  # a page's words lie side by side
    _digest_kernel[(len(pages), len(planes))](
        words,
        index,
        state,
        words.stride(0),
        words.stride(1),
        words.stride(2),
        planes.start,
        pages.start,
        len(index),
        num_words=tokens * run,
        run=run,
        step=DIGEST_BLOCK * STEP.value & (1 << 64) - 1,
        block=DIGEST_BLOCK,
        num_warps=4,
    )


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _salted(word, salt):  # type: ignore[no-untyped-def]
    """One wide multiplication a word: with the three of `_mix`, arithmetic took longer than reading."""
    mixed = word ^ salt
    return word + mixed.to(tl.uint32).to(tl.uint64) * (mixed >> 32)


# Where a launch begins and how many pages a prompt has are no constants: each would be compiled anew.
@triton.jit(do_not_specialize=["first_plane", "first_page", "num_pages"])  # type: ignore[untyped-decorator]
def _digest_kernel(  # type: ignore[no-untyped-def]
    pool,
    index,
    state,
    plane_stride,
    page_stride,
    token_stride,
    first_plane,
    first_page,
    num_pages,
    num_words: tl.constexpr,
    run: tl.constexpr,
    step: tl.constexpr,
    block: tl.constexpr,
):
    item = first_page + tl.program_id(0)
    plane = (first_plane + tl.program_id(1)).to(tl.int64)
    words = pool + plane * plane_stride + tl.load(index + item).to(tl.int64) * page_stride
    lane = tl.arange(0, block)
    salt = (lane + 1).to(tl.uint64) * STEP  # of each word's place; a multiplication a word would cost as much as the reading
    total = tl.zeros((block,), tl.uint64)
    for start in range(0, num_words, block):
        place = start + lane
        far = place if run == num_words else (place // run).to(tl.int64) * token_stride + place % run
        if num_words % block == 0:
            total += _salted(tl.load(words + far).to(tl.uint64, bitcast=True), salt)
        else:
            there = place < num_words
            word = tl.load(words + far, mask=there, other=0).to(tl.uint64, bitcast=True)
            total += tl.where(there, _salted(word, salt), 0)
        salt += step
    digest = _mix((tl.sum(total.to(tl.int64, bitcast=True), axis=0) + num_words * 8).to(tl.uint64, bitcast=True))
    number = plane * num_pages + item + 1
    term = _mix(digest ^ (number.to(tl.uint64) * STEP)).to(tl.int64, bitcast=True)
    before = tl.load(state + number)
    tl.store(state + number, term)
    tl.atomic_add(state, term - before, sem="relaxed")
