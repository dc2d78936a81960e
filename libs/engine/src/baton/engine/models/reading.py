"""One layer's tensors by their short names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from baton.engine.linear import Linear, Tuning, make_linear
from baton.engine.rope import interleave
from baton.engine.weights import Reader


@dataclass(frozen=True, slots=True)
class Projection:
    """`name` has `num_rows` outputs. rotated: they are heads of queries or keys, reordered for `rotate_`."""

    name: str
    num_rows: int
    rotated: bool = False


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Reads below `prefix`. head_dim: of the rotated projections."""

    reader: Reader
    prefix: str
    head_dim: int

    def vector(self, name: str, size: int) -> Tensor:
        return self.reader.read(f"{self.prefix}{name}", (size,))

    def matrix(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        return self.reader.read(f"{self.prefix}{name}.weight", (num_rows, num_columns))

    def linear(self, name: str, num_rows: int, num_columns: int, *, has_bias: bool, tuning: Tuning) -> Linear:
        bias = self.vector(f"{name}.bias", num_rows) if has_bias else None
        return make_linear(self.matrix(name, num_rows, num_columns), bias, tuning)

    def fused(self, projections: Sequence[Projection], num_columns: int, *, has_bias: bool, tuning: Tuning) -> Linear:
        """Several projections of the same input as one product, their outputs side by side."""
        weights = [self._ordered(self.matrix(part.name, part.num_rows, num_columns), part) for part in projections]
        biases = [self._ordered(self.vector(f"{part.name}.bias", part.num_rows), part) for part in projections] if has_bias else []
        return make_linear(torch.cat(weights), torch.cat(biases) if biases else None, tuning)

    def _ordered(self, rows: Tensor, part: Projection) -> Tensor:
        return interleave(rows, self.head_dim) if part.rotated else rows


def own_words(token_ids: Tensor, embedding: Tensor, rank: int) -> Tensor:
    """Rows of `embedding`, rank `rank`'s equal share of all words; zeros for words of other ranks, so that the ranks' sum is the look-up."""
    own = token_ids - rank * len(embedding)
    missing = (own < 0) | (own >= len(embedding))
    return F.embedding(own.masked_fill(missing, 0), embedding).masked_fill_(missing.unsqueeze(1), 0)
