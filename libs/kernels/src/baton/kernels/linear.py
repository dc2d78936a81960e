"""Matrix products whose cost is reading the weight, and those that must not depend on the batch."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.dispatch import FLOATS, expect, expect_dense, runs_triton
from baton.kernels.limits import DEPTH_STEP, MAX_HIDDEN
from baton.kernels.naive import naive_linear_few, naive_linear_few_norm, naive_linear_invariant

#: Beyond that a library's product is better.
MAX_ROWS = 64


def linear_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    silu_mul: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As `naive_linear_few`, for 1 to 64 rows: streams the weight once. Raises ValueError.

    For up to 16 rows one tiling serves all counts: a row's result does not depend on how many others there are.
    """
    if not 1 <= len(x) <= MAX_ROWS:
        raise ValueError(f"x has {len(x)} rows; linear_few takes 1 to {MAX_ROWS}")
    _check(x, weight, bias)
    width = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    if silu_mul and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows; gate and up must be of equal width")
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            expect(name, tensor, (len(x), width), x.dtype)
            expect_dense(name, tensor)
    if not runs_triton(x):
        return naive_linear_few(x, weight, bias, residual, silu_mul=silu_mul, out=out)
    from baton.kernels.device.linear import launch_linear_few

    return launch_linear_few(x, weight, bias, residual, silu_mul, out)


def linear_few_norm(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `naive_linear_few_norm`, for 1 to 64 rows; equal to `linear_few` and `rms_norm`, in at most two launches. Raises ValueError."""
    if not 1 <= len(x) <= MAX_ROWS:
        raise ValueError(f"x has {len(x)} rows; linear_few_norm takes 1 to {MAX_ROWS}")
    _check(x, weight, bias)
    width = weight.shape[0]
    expect("residual", residual, (len(x), width), x.dtype)
    expect_dense("residual", residual)
    expect("norm", norm, (width,), x.dtype)
    expect_dense("norm", norm)
    if width > MAX_HIDDEN:
        raise ValueError(f"weight has {width} rows; a norm takes at most {MAX_HIDDEN}")
    if not runs_triton(x):
        return naive_linear_few_norm(x, weight, bias, residual, norm, eps)
    from baton.kernels.device.linear import launch_linear_few_norm

    return launch_linear_few_norm(x, weight, bias, residual, norm, eps)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `naive_linear_invariant`: any number of rows; the order in which a row's products are added is always the same. Raises ValueError."""
    _check(x, weight, bias)
    if not runs_triton(x):
        return naive_linear_invariant(x, weight, bias)
    from baton.kernels.device.linear import launch_linear_invariant

    return launch_linear_invariant(x, weight, bias)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expect("x", x, (-1, -1), FLOATS)
    expect_dense("x", x)
    expect("weight", weight, (-1, x.shape[1]), x.dtype)
    expect_dense("weight", weight)
    if x.shape[1] % DEPTH_STEP:
        raise ValueError(f"x has {x.shape[1]} columns; it must be a multiple of {DEPTH_STEP}")
    if bias is not None:
        expect("bias", bias, (weight.shape[0],), x.dtype)
