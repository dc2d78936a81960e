"""The gate of an MLP."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.dispatch import FLOATS, expect, expect_dense, runs_triton
from baton.kernels.naive import naive_silu_mul


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `naive_silu_mul`. gate_up may be strided over rows. Raises ValueError."""
    expect("gate_up", gate_up, (-1, -1), FLOATS)
    expect_dense("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns; gate and up must be of equal width")
    if not runs_triton(gate_up):
        return naive_silu_mul(gate_up)
    from baton.kernels.device.activation import launch_silu_mul

    return launch_silu_mul(gate_up)
