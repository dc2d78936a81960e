"""What the ranks of a tensor-parallel group say to each other inside a forward pass."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """A group of `size` ranks of which this is number `rank`. All ranks call the same methods in the same order with equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, in `partial` itself."""

    def gather_columns(self, part: Tensor) -> Tensor:
        """part [n, m] of every rank, side by side in the order of ranks: [n, size * m]."""
