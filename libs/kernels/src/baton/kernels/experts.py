"""A mixture of experts: routing, the grouped product, the sum of what the experts say."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.dispatch import FLOATS, expect, expect_dense, runs_triton
from baton.kernels.limits import DEPTH_STEP, MAX_EXPERTS
from baton.kernels.naive import naive_grouped_linear, naive_moe_combine, naive_moe_route


def moe_route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `naive_moe_route`. Raises ValueError."""
    expect("logits", logits, (-1, -1), FLOATS)
    expect_dense("logits", logits)
    if not 1 <= top_k <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(f"top_k = {top_k} of {logits.shape[1]} experts; it must be 1 to that number, and that at most {MAX_EXPERTS}")
    if not runs_triton(logits):
        return naive_moe_route(logits, top_k, renormalize)
    from baton.kernels.device.experts import launch_route

    return launch_route(logits, top_k, renormalize)


def grouped_linear(x: Tensor, weight: Tensor, sorted_index: Tensor, offsets: Tensor, *, invariant: bool = False) -> Tensor:
    """As `naive_grouped_linear`. Raises ValueError.

    invariant: a row's result does not depend on how many rows there are (the deterministic mode): tiles of 64 rows or a multiple, which all
    use the same matrix instruction. Without it, few rows get tiles of 16 and another instruction, whose sums may differ in the last bit.
    """
    expect("x", x, (-1, -1), FLOATS)
    expect_dense("x", x)
    expect("weight", weight, (-1, -1, x.shape[1]), x.dtype)
    expect_dense("weight", weight)
    expect("sorted_index", sorted_index, (-1,), torch.int32)
    expect("offsets", offsets, (weight.shape[0] + 1,), torch.int32)
    if not len(x) or len(sorted_index) % len(x):
        raise ValueError(f"sorted_index has {len(sorted_index)} assignments, x {len(x)} rows; the first must be a multiple of the second")
    if x.shape[1] % DEPTH_STEP:
        raise ValueError(f"x has {x.shape[1]} columns; it must be a multiple of {DEPTH_STEP}")
    if not runs_triton(x):
        return naive_grouped_linear(x, weight, sorted_index, offsets, invariant=invariant)
    from baton.kernels.device.grouped import launch_grouped_linear

    return launch_grouped_linear(x, weight, sorted_index, offsets, invariant)


def moe_combine(outputs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """As `naive_moe_combine`. Raises ValueError."""
    expect("weights", weights, (-1, -1), torch.float32)
    expect_dense("weights", weights, 2)
    expect("outputs", outputs, (weights.shape[0] * weights.shape[1], -1), FLOATS)
    expect_dense("outputs", outputs, 2)
    if residual is not None:
        expect("residual", residual, (weights.shape[0], outputs.shape[1]), outputs.dtype)
        expect_dense("residual", residual)
    if not runs_triton(outputs):
        return naive_moe_combine(outputs, weights, residual)
    from baton.kernels.device.experts import launch_combine

    return launch_combine(outputs, weights, residual)
