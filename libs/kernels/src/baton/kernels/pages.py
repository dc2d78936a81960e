"""Pages in and out of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.dispatch import FLOATS, expect, expect_dense, runs_triton
from baton.kernels.naive import naive_gather_heads, naive_gather_pages, naive_scatter_heads, naive_scatter_pages


def gather_pages(pool: Tensor, index: Tensor) -> Tensor:
    """As `naive_gather_pages`. Raises ValueError; page numbers are not checked on a GPU."""
    _check(pool, index, 2)
    if not runs_triton(pool):
        return naive_gather_pages(pool, index)
    from baton.kernels.device.pages import launch_copy

    packed = torch.empty(len(index), pool.shape[1], dtype=pool.dtype, device=pool.device)
    launch_copy(_as_heads(pool), index, _as_heads(packed), 0, into_pool=False)
    return packed


def scatter_pages(pool: Tensor, index: Tensor, source: Tensor) -> None:
    """As `naive_scatter_pages`. Raises ValueError; page numbers are not checked on a GPU."""
    _check(pool, index, 2)
    expect("source", source, (len(index), pool.shape[1]), pool.dtype)
    expect_dense("source", source, 2)
    if not runs_triton(pool):
        naive_scatter_pages(pool, index, source)
        return
    from baton.kernels.device.pages import launch_copy

    launch_copy(_as_heads(pool), index, _as_heads(source), 0, into_pool=True)


def gather_heads(pool: Tensor, index: Tensor, first: int, count: int) -> Tensor:
    """As `naive_gather_heads`. Raises ValueError; page numbers are not checked on a GPU."""
    _check(pool, index, 4)
    _check_heads(pool, first, count)
    if not runs_triton(pool):
        return naive_gather_heads(pool, index, first, count)
    from baton.kernels.device.pages import launch_copy

    packed = torch.empty(len(index), pool.shape[1], count, pool.shape[3], dtype=pool.dtype, device=pool.device)
    launch_copy(pool, index, packed, first, into_pool=False)
    return packed


def scatter_heads(pool: Tensor, index: Tensor, source: Tensor, first: int) -> None:
    """As `naive_scatter_heads`. Raises ValueError; page numbers are not checked on a GPU."""
    _check(pool, index, 4)
    expect("source", source, (len(index), pool.shape[1], -1, pool.shape[3]), pool.dtype)
    expect_dense("source", source, 4)
    _check_heads(pool, first, source.shape[2])
    if not runs_triton(pool):
        naive_scatter_heads(pool, index, source, first)
        return
    from baton.kernels.device.pages import launch_copy

    launch_copy(pool, index, source, first, into_pool=True)


def _as_heads(pages: Tensor) -> Tensor:
    """[m, elements] as [m, 1, 1, elements]."""
    return pages.unsqueeze(1).unsqueeze(1)


def _check(pool: Tensor, index: Tensor, ndim: int) -> None:
    expect("pool", pool, (-1,) * ndim, (*FLOATS, torch.uint8, torch.int32, torch.int64))
    expect_dense("pool", pool, 1 if ndim == 2 else 2)
    expect("index", index, (-1,), torch.int32)


def _check_heads(pool: Tensor, first: int, count: int) -> None:
    if first < 0 or count < 1 or first + count > pool.shape[2]:
        raise ValueError(f"heads {first} to {first + count} are wanted; pool has {pool.shape[2]}")
