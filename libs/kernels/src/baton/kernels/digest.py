"""The digest of pages where they are, one launch however many planes they lie in."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.dispatch import expect, expect_dense, runs_triton
from baton.kernels.naive import naive_page_digest

MASK = (1 << 64) - 1


def page_digest(pool: Tensor, index: Tensor, state: Tensor, planes: range, pages: range) -> None:
    """As `naive_page_digest`. Raises ValueError; page numbers are not checked on a GPU. Without planes or pages nothing runs, but on a GPU the kernel
    is compiled."""
    expect("pool", pool, (-1, -1, -1, -1), torch.uint8)
    expect_dense("pool", pool)
    expect("index", index, (-1,), torch.int32)
    expect_dense("index", index)
    expect("state", state, (1 + pool.shape[0] * len(index),), torch.int64)
    expect_dense("state", state)
    if pool.shape[3] % 8 or any(stride % 8 for stride in pool.stride()[:3]):
        raise ValueError(f"pool has tokens of {pool.shape[3]} bytes and strides {list(pool.stride())}; but for the last, all must be multiples of 8")
    _check_range("planes", planes, pool.shape[0])
    _check_range("pages", pages, len(index))
    if not runs_triton(pool):
        naive_page_digest(pool, index, state, planes, pages)
        return
    from baton.kernels.device.digest import launch_digest

    launch_digest(pool, index, state, planes, pages)


def whole_digest(total: int, count: int) -> int:
    """64 bits, of all pages. total: state[0] once each of `count` pages (of all planes) was added."""
    word = (total + 8 * count) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def _check_range(name: str, given: range, count: int) -> None:
    if given.step != 1 or not 0 <= given.start <= given.stop <= count:
        raise ValueError(f"{name} = {given}; it must be a range of consecutive numbers from 0 to {count}")
