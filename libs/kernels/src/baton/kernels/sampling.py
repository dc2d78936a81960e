"""Draws tokens on the device: the next step can start without the host knowing them."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.dispatch import FLOATS, expect, expect_dense, runs_triton
from baton.kernels.naive import naive_sample


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    forbidden: Tensor | None = None,
) -> Tensor:
    """As `naive_sample`; logits may be strided over rows; forbidden ones are changed meanwhile, and given back. Raises ValueError.

    A row's token does not depend on the batch; it is the twin's but where two tokens arrive within rounding of one another, or top_p lies
    within rounding of the mass of a nucleus.
    """
    expect("logits", logits, (-1, -1), FLOATS)
    expect_dense("logits", logits)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seed", seed, torch.int64),
        ("position", position, torch.int64),
    ):
        expect(name, tensor, (len(logits),), dtype)
        expect_dense(name, tensor)
    if forbidden is not None:
        expect("forbidden", forbidden, (len(logits), -1), torch.int32)
        expect_dense("forbidden", forbidden)
    if not runs_triton(logits):
        return naive_sample(logits, temperature, top_k, top_p, min_p, seed, position, forbidden)
    from baton.kernels.device.sampling import launch_sample

    return launch_sample(logits, temperature, top_k, top_p, min_p, seed, position, forbidden)
