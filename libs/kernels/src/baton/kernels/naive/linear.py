"""Matrix products of few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.naive.activation import naive_silu_mul


def naive_linear_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [m, k] times weight [n, k] transposed, plus bias [n]; [m, n] in x's dtype, summed in float32 and rounded once.

    norm_weight [k]: the product is of the RMS norm of x (eps): x * norm_weight is rounded, and the norm's factor, being one number a row,
    is applied to the sum. silu_mul: weight holds the gate's n / 2 rows, then the up projection's; the result is silu(gate) * up, [m, n / 2].
    residual, of the result's shape, is added to the rounded result, and that rounded again. out: where the result goes; may be `residual`.
    """
    wide = x.float()
    if norm_weight is not None:
        total = (wide * norm_weight.float()).to(x.dtype).float() @ weight.float().T
        total = total * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    else:
        total = wide @ weight.float().T
    if bias is not None:
        total = total + bias.float()
    result = total.to(x.dtype)
    if silu_mul:
        result = naive_silu_mul(result)
    if residual is not None:
        result = result + residual
    return result if out is None else out.copy_(result)


def naive_linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [m, k] times weight [n, k] transposed, plus bias [n]. A row's result does not depend on m nor on the other rows."""
    return naive_linear_few(x, weight, bias)
