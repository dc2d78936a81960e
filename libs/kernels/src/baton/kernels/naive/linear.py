"""Matrix products of few rows."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.naive.activation import naive_silu_mul
from baton.kernels.naive.norm import naive_rms_norm


def naive_linear_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    silu_mul: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [m, k] times weight [n, k] transposed, plus bias [n]; [m, n] in x's dtype, summed in float32 and rounded once.

    silu_mul: weight holds the gate's n / 2 rows, then the up projection's; the result is silu(gate) * up, [m, n / 2].
    residual, of the result's shape, is added to the rounded result, and that rounded again. out: where the result goes; may be `residual`.
    """
    total = x.float() @ weight.float().T
    if bias is not None:
        total = total + bias.float()
    result = total.to(x.dtype)
    if silu_mul:
        result = naive_silu_mul(result)
    if residual is not None:
        result = result + residual
    return result if out is None else out.copy_(result)


def naive_linear_few_norm(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rows, normed): `naive_linear_few` with this residual, and `naive_rms_norm` of it with the weight `norm` [n]."""
    rows = naive_linear_few(x, weight, bias, residual)
    return rows, naive_rms_norm(rows, norm, eps)


def naive_linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [m, k] times weight [n, k] transposed, plus bias [n]. A row's result does not depend on m nor on the other rows."""
    return naive_linear_few(x, weight, bias)
