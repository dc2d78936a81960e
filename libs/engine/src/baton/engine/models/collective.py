"""What the ranks of a tensor-parallel group say to each other inside a forward pass."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Collective(Protocol):
    """A group of `size` ranks of which this is number `rank`. All ranks call the same methods in the same order with equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, in `partial` itself; every rank gets the same bits."""

    def gather_columns(self, part: Tensor) -> Tensor:
        """part [n, m] of every rank, side by side in the order of ranks: [n, size * m]."""


class ProcessGroup:
    """A Collective over a torch.distributed group that the caller has made and ends: gloo for CPU tensors, NCCL for GPUs of one host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def sum_(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial, group=self._group)
        return partial

    def gather_columns(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self._size)]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)
