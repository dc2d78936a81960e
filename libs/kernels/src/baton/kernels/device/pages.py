"""Copies between pages and packed buffers, and the digest of pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COPY_BLOCK = 4096
DIGEST_BLOCK = 1024


def launch_copy(pool: Tensor, index: Tensor, packed: Tensor, first: int, into_pool: bool) -> None:
    """packed [m, tokens, count, elements] to or from heads `first` on of pages `index` of pool [pages, tokens, heads, elements]."""
    num_pages, tokens, count, width = packed.shape
    if packed.numel() == 0:
        return
    per_page = tokens * count * width
    _copy_kernel[(num_pages, triton.cdiv(per_page, COPY_BLOCK))](
        pool,
        index,
        packed,
        index.stride(0),
        pool.stride(0),
        pool.stride(1),
        first * pool.stride(2),
        per_page=per_page,
        run=count * width,
        block=COPY_BLOCK,
        into_pool=into_pool,
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(  # type: ignore[no-untyped-def]
    pool,
    index,
    packed,
    index_stride,
    page_stride,
    token_stride,
    offset,
    per_page: tl.constexpr,
    run: tl.constexpr,
    block: tl.constexpr,
    into_pool: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    page = tl.load(index + item * index_stride).to(tl.int64)
    element = tl.program_id(1) * block + tl.arange(0, block)
    there = element < per_page
    far = pool + page * page_stride + (element // run) * token_stride + offset + element % run
    near = packed + item * per_page + element
    if into_pool:
        tl.store(far, tl.load(near, mask=there), mask=there)
    else:
        tl.store(near, tl.load(far, mask=there), mask=there)


def launch_digest(pool: Tensor, index: Tensor) -> Tensor:
    words = pool.view(torch.int64)
    digests = torch.empty(len(index), dtype=torch.int64, device=pool.device)
    if len(index):
        _digest_kernel[(len(index),)](words, index, digests, index.stride(0), words.stride(0), words.shape[1], block=DIGEST_BLOCK, num_warps=4)
    return digests


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


# The number of words is no constant: digests of digests have as many as a prompt has pages, and each number would be compiled anew.
@triton.jit(do_not_specialize=["num_words"])  # type: ignore[untyped-decorator]
def _digest_kernel(pool, index, digests, index_stride, page_stride, num_words, block: tl.constexpr):  # type: ignore[no-untyped-def]
    item = tl.program_id(0).to(tl.int64)
    page = tl.load(index + item * index_stride).to(tl.int64)
    lane = tl.arange(0, block)
    total = tl.zeros((block,), tl.int64)
    for start in range(0, num_words, block):
        place = start + lane
        there = place < num_words
        word = tl.load(pool + page * page_stride + place, mask=there, other=0).to(tl.uint64, bitcast=True)
        mixed = _mix(word ^ ((place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15))
        total += tl.where(there, mixed.to(tl.int64, bitcast=True), 0)
    final = _mix((tl.sum(total, axis=0) + num_words.to(tl.int64) * 8).to(tl.uint64, bitcast=True))
    tl.store(digests + item, final.to(tl.int64, bitcast=True))
