"""Matrix products with constant weights on a device."""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from baton.engine.models.collective import Collective
from baton.kernels import add_rms_norm, is_chained, linear_few, linear_few_norm, linear_invariant, rms_norm, silu_mul


class Mode(enum.Enum):
    """How the rows of a step are multiplied.

    MANY: the library's product (cuBLAS), which is near the matrix rate for a prompt's rows and near the memory's for few.
    FEW: where something follows the product, one kernel that streams the weight and does that too: a decode step is bound by reading weights
    and by the number of launches. The norm before a product stays a launch of its own: inside, every program would repeat it (seen on an H200
    with 16 rows: 75 us instead of 24 + 2).
    INVARIANT: a row's result does not depend on the other rows (the deterministic mode); slower.
    """

    MANY = enum.auto()
    FEW = enum.auto()
    INVARIANT = enum.auto()


#: From so many outputs on the streaming kernel beats the library's for few rows: a vocabulary, 0.290 against 0.308 ms on an H200. In chained launches
#: always: its first lines come while the norm before it still runs.
MANY_OUTPUTS = 65_536


class Product:
    """weight [out, in], bias [out] or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, rows: Tensor, mode: Mode) -> Tensor:
        """rows [n, in] -> [n, out]."""
        if mode is Mode.INVARIANT:
            return linear_invariant(rows, self.weight, self.bias)
        if self._streamed(mode):
            return linear_few(rows, self.weight, self.bias)
        return F.linear(rows, self.weight, self.bias)

    def into(self, out: Tensor, rows: Tensor, mode: Mode) -> None:
        """The same numbers, in `out` [n, out]; without a bias, in the launch that computes them."""
        if mode is not Mode.INVARIANT and self._streamed(mode):
            linear_few(rows, self.weight, self.bias, out=out)
        elif mode is not Mode.INVARIANT and self.bias is None:
            torch.mm(rows, self.weight.t(), out=out)
        else:
            out.copy_(self(rows, mode))

    def _streamed(self, mode: Mode) -> bool:
        return mode is Mode.FEW and (is_chained() or len(self.weight) >= MANY_OUTPUTS)

    def activated(self, rows: Tensor, mode: Mode) -> Tensor:
        """For weights that hold gate, then up: silu(gate) * up of the product."""
        if mode is Mode.FEW:
            return linear_few(rows, self.weight, self.bias, silu_mul=True)
        return silu_mul(self(rows, mode))


class Stream:
    """The residual stream of a step's rows, with at most one addition outstanding, of rows or of a product that is still to be computed.

    The norm that follows carries it out, in one kernel.

    group: None, or the tensor-parallel group whose ranks each have a part of what is added; every rank has the whole stream.
    """

    __slots__ = ("_group", "_pending", "_rows", "eps")

    def __init__(self, rows: Tensor, eps: float, group: Collective | None = None) -> None:
        self._rows = rows
        self._pending: Tensor | tuple[Product, Tensor] | None = None
        self._group = group
        self.eps = eps

    def add(self, product: Product, rows: Tensor, mode: Mode) -> None:
        if mode is Mode.FEW and self._group is None:
            self.settled()
            self._pending = product, rows
        else:
            self.add_rows(product(rows, mode))

    def add_rows(self, rows: Tensor) -> None:
        self.settled()
        self._pending = rows if self._group is None else self._group.sum_(rows)

    def normed(self, weight: Tensor) -> Tensor:
        if self._pending is None:
            return rms_norm(self._rows, weight, self.eps)
        pending, self._pending = self._pending, None
        if isinstance(pending, tuple):
            product, rows = pending
            self._rows, normed = linear_few_norm(rows, product.weight, product.bias, self._rows, weight, self.eps)
            return normed
        return add_rms_norm(pending, self._rows, weight, self.eps)

    def settled(self) -> Tensor:
        """The rows with everything added."""
        pending, self._pending = self._pending, None
        if isinstance(pending, tuple):
            product, rows = pending
            self._rows = linear_few(rows, product.weight, product.bias, self._rows)
        elif pending is not None:
            self._rows += pending
        return self._rows

    def select(self, rows: Tensor) -> Stream:
        """The stream of some of the rows."""
        return Stream(self.settled()[rows], self.eps, self._group)
