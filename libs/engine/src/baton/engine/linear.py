"""Matrix products with constant weights, in the layout that is fastest on this machine.

The packed product has no public name in torch; it is what torch.compile emits on a CPU. Everything that depends on it is in this file.
"""

from __future__ import annotations

import enum
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

#: oneDNN picks its blocked weight layout for this many rows. 16 was at least as fast as the exact number for 1 to 1,024 rows
#: (float32, AVX2), so that one packed copy serves every number of rows.
_PACK_ROWS = 16

#: From this many rows on the default product (MKL) is the faster one: 170 to 180 against 160 GFLOP/s at 1,024 rows on two AVX2 cores.
_MANY_ROWS = 256


class Tuning(enum.Enum):
    """What a matrix is mostly multiplied with. ANY holds two copies of the weights, one for each."""

    FEW_ROWS = "few rows"
    MANY_ROWS = "many rows"
    ANY = "any"


class Linear(Protocol):
    """rows [n, in] -> [n, out]."""

    def __call__(self, rows: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """residual [n, out] + the product; may overwrite `residual`: use only what is returned."""


class PlainLinear:
    """weight [out, in], as Hugging Face stores it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self._weight, self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        if self._bias is not None:
            residual += self._bias
        return residual.addmm_(rows, self._weight.t())


class PackedLinear:
    """float32 weights reordered once into oneDNN's blocked layout.

    Against torch's default product on two AVX2 cores: 22 to 27 GB/s of weights at one row where the default reads 12 to 14,
    and 1.6 to 2 times its rate at 16 rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)  # noqa: SLF001
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")  # noqa: SLF001
        return product

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self._packed, self._bias, "add")  # noqa: SLF001
        return total


class TwofoldLinear:
    """Both layouts, and the faster one for the number of rows at hand."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._few = PackedLinear(weight, bias)
        self._many = PlainLinear(weight, bias)

    def __call__(self, rows: Tensor) -> Tensor:
        return self._many(rows) if len(rows) >= _MANY_ROWS else self._few(rows)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return self._many.add_to(residual, rows) if len(rows) >= _MANY_ROWS else self._few.add_to(residual, rows)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor have the packed product for `dtype`."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32


def make_linear(weight: Tensor, bias: Tensor | None, tuning: Tuning) -> Linear:
    """Takes `weight` [out, in] over. Where `can_pack` says no, the plain product serves every tuning."""
    if tuning is Tuning.MANY_ROWS or not can_pack(weight.dtype):
        return PlainLinear(weight, bias)
    return PackedLinear(weight, bias) if tuning is Tuning.FEW_ROWS else TwofoldLinear(weight, bias)
