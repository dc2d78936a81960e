"""Root mean square norms."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, h] over the root of its mean square along h, times weight [h]; [n, h] in x's dtype.

    The order of roundings is that of transformers' Llama and Qwen: the norm in float32, rounded to x's dtype, then the product with weight.
    """
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def naive_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [n, h] += x [n, h], in place and rounded to its dtype; then the norm of the new residual as in `naive_rms_norm`."""
    residual.add_(x)
    return naive_rms_norm(residual, weight, eps)
