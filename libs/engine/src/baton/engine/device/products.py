"""Matrix products with constant weights on a device."""

from __future__ import annotations

import enum

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from baton.kernels import add_rms_norm, linear_few, linear_invariant, rms_norm, silu_mul


class Mode(enum.Enum):
    """How the rows of a step are multiplied.

    MANY: the library's product (cuBLAS), which is near the matrix rate for a prompt's rows. FEW: one kernel that streams the weight, with the
    norm before it and the activation or the sum after it inside: a decode step is bound by reading weights and by the number of launches.
    INVARIANT: a row's result does not depend on the other rows (the deterministic mode); slower.
    """

    MANY = enum.auto()
    FEW = enum.auto()
    INVARIANT = enum.auto()


class Product:
    """weight [out, in], bias [out] or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, rows: Tensor, mode: Mode) -> Tensor:
        """rows [n, in] -> [n, out]."""
        if mode is Mode.FEW:
            return linear_few(rows, self.weight, self.bias)
        if mode is Mode.INVARIANT:
            return linear_invariant(rows, self.weight, self.bias)
        return F.linear(rows, self.weight, self.bias)

    def of_normed(self, stream: Stream, norm: Tensor, mode: Mode) -> Tensor:
        """The product of the normed residual stream."""
        if mode is Mode.FEW:
            return linear_few(stream.settled(), self.weight, self.bias, norm_weight=norm, eps=stream.eps)
        return self(stream.normed(norm), mode)

    def activated(self, stream: Stream, norm: Tensor, mode: Mode) -> Tensor:
        """For weights that hold gate, then up: silu(gate) * up of the normed residual stream."""
        if mode is Mode.FEW:
            return linear_few(stream.settled(), self.weight, self.bias, norm_weight=norm, eps=stream.eps, silu_mul=True)
        return silu_mul(self(stream.normed(norm), mode))


class Stream:
    """The residual stream of a step's rows, with at most one addition outstanding: it is carried out by the norm that follows, in one kernel."""

    __slots__ = ("_pending", "_rows", "eps")

    def __init__(self, rows: Tensor, eps: float) -> None:
        self._rows = rows
        self._pending: Tensor | None = None
        self.eps = eps

    def add(self, product: Product, rows: Tensor, mode: Mode) -> None:
        if mode is Mode.FEW:
            self._rows = linear_few(rows, product.weight, product.bias, self.settled())
        else:
            self.add_rows(product(rows, mode))

    def add_rows(self, rows: Tensor) -> None:
        self.settled()
        self._pending = rows

    def normed(self, weight: Tensor) -> Tensor:
        if self._pending is None:
            return rms_norm(self._rows, weight, self.eps)
        pending, self._pending = self._pending, None
        return add_rms_norm(pending, self._rows, weight, self.eps)

    def settled(self) -> Tensor:
        """The rows with everything added."""
        if self._pending is not None:
            self._rows += self._pending
            self._pending = None
        return self._rows

    def select(self, rows: Tensor) -> Stream:
        """The stream of some of the rows."""
        return Stream(self.settled()[rows], self.eps)
