"""Copies between pages and packed buffers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COPY_BLOCK = 4096


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
