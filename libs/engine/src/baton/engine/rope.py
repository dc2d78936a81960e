"""Rotary position embedding as one complex multiplication."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians that a pair of dimensions turns a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def rotations(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim / 2] complex64: e^(i * position * frequency), times yarn's attention scaling.

    The factor is on the table, so rotated queries and keys both carry it, as in transformers; keys in pages do too.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.complex(angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling)


def interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of a query or key projection (dim 0, whole heads) so that the two halves of a head alternate.

    Hugging Face rotates dimension i with i + head_dim / 2. With the pairs side by side a rotation is one complex product in place.
    Scores do not change: queries and keys are reordered alike.
    """
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """Rotates `heads` [tokens, heads, head_dim] in place by `turns` [tokens, 1, head_dim / 2] complex64."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype is torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(turns)))


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), blended, scaled)


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often within the original context are kept, those that turn less than once are slowed by `factor`, a ramp between."""

    def dimension(turns: float) -> float:
        """The pair (as a real number) that turns so many times over the original context."""
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step in the place of the ramp
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)
