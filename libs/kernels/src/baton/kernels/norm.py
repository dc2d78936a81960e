"""Root mean square norms, with the residual or without."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.dispatch import FLOATS, expect, expect_dense, runs_triton
from baton.kernels.limits import MAX_HIDDEN
from baton.kernels.naive import naive_add_rms_norm, naive_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `naive_rms_norm`. x may be strided over rows. Raises ValueError."""
    _check(x, weight)
    if not runs_triton(x):
        return naive_rms_norm(x, weight, eps)
    from baton.kernels.device.norm import launch_rms_norm

    return launch_rms_norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `naive_add_rms_norm`: residual is updated in place. x and residual may be strided over rows. Raises ValueError."""
    _check(x, weight)
    expect("residual", residual, tuple(x.shape), x.dtype)
    expect_dense("residual", residual)
    if not runs_triton(x):
        return naive_add_rms_norm(x, residual, weight, eps)
    from baton.kernels.device.norm import launch_rms_norm

    return launch_rms_norm(x, residual, weight, eps)


def _check(x: Tensor, weight: Tensor) -> None:
    expect("x", x, (-1, -1), FLOATS)
    expect("weight", weight, (x.shape[1],), x.dtype)
    expect_dense("x", x)
    expect_dense("weight", weight)
    if x.shape[1] > MAX_HIDDEN:
        raise ValueError(f"x has {x.shape[1]} columns; a norm takes at most {MAX_HIDDEN}")
