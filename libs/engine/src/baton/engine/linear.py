"""Matrix products with constant weights, in the layout that is fastest on this machine.

The packed product has no public name in torch; it is what torch.compile emits on a CPU. Everything that depends on it is in this file.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

#: oneDNN picks its blocked weight layout for this many rows. 16 was at least as fast as the exact number for 1 to 1,024 rows
#: (float32, AVX2), so that one copy of the weights serves decode and prefill.
_PACK_ROWS = 16


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


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor have the packed product for `dtype`."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Takes `weight` [out, in] over. Which of the two kinds it becomes is `can_pack`'s word; the model names it in `linear_kind`."""
    if can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
