"""Pages in and out of a pool, whole or some heads of them."""

from __future__ import annotations

from torch import Tensor


def naive_gather_pages(pool: Tensor, index: Tensor) -> Tensor:
    """pool [pages, page elements], index [m] int32 -> [m, page elements]: those pages, one after the other."""
    return pool[index.long()].contiguous()


def naive_scatter_pages(pool: Tensor, index: Tensor, source: Tensor) -> None:
    """source [m, page elements] into pages `index` [m] int32 of pool [pages, page elements]; no page twice."""
    pool[index.long()] = source


def naive_gather_heads(pool: Tensor, index: Tensor, first: int, count: int) -> Tensor:
    """Of pages `index` [m] int32 of pool [pages, page size, kv heads, head dim]: heads first to first + count, contiguous.

    Returns [m, page size, count, head dim]: what a peer of another tensor-parallel degree wants of these pages.
    """
    return pool[index.long(), :, first : first + count].contiguous()


def naive_scatter_heads(pool: Tensor, index: Tensor, source: Tensor, first: int) -> None:
    """source [m, page size, count, head dim] into heads first to first + count of pages `index` [m] int32 of pool; no page twice."""
    pool[index.long(), :, first : first + source.shape[2]] = source
