"""The gate of an MLP."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2 * i], the gate first -> silu(gate) * up [n, i]. silu in float32, rounded to the dtype before the product, as torch does."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
