"""What follows attention in a layer, on a device: one gated MLP, or a router and many of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from baton.engine.device.products import Mode, Product, Stream
from baton.engine.model_config import ModelConfig, MoeConfig
from baton.engine.weights import Reader
from baton.kernels import grouped_linear, moe_combine, moe_route, silu_mul


class DeviceMlp(Protocol):
    def add_to(self, stream: Stream, norm: Tensor, mode: Mode) -> None:
        """Adds the layer's second half to the stream."""


class GatedMlp:
    """gate_up: gate, then up."""

    def __init__(self, gate_up: Product, down: Product) -> None:
        self._gate_up = gate_up
        self._down = down

    def add_to(self, stream: Stream, norm: Tensor, mode: Mode) -> None:
        stream.add(self._down, self._gate_up.activated(stream.normed(norm), mode), mode)


class SparseMlp:
    """gate_up [experts, 2 * inner, hidden], down [experts, hidden, inner]: rows meet their experts in one launch each.

    INVARIANT: the products of experts, too, add up in one fixed order, whatever the number of rows.
    """

    def __init__(self, moe: MoeConfig, router: Product, gate_up: Tensor, down: Tensor) -> None:
        self._moe = moe
        self._router = router
        self._gate_up = gate_up
        self._down = down

    def add_to(self, stream: Stream, norm: Tensor, mode: Mode) -> None:
        rows = stream.normed(norm)
        invariant = mode is Mode.INVARIANT
        scores = self._router(rows, mode)
        weights, _, order, offsets = moe_route(scores, self._moe.experts_per_token, self._moe.renormalize)
        inner = silu_mul(grouped_linear(rows, self._gate_up, order, offsets, invariant=invariant))
        stream.add_rows(moe_combine(grouped_linear(inner, self._down, order, offsets, invariant=invariant), weights))


def read_experts(config: ModelConfig, moe: MoeConfig, reader: Reader, prefix: str, device: torch.device, dtype: torch.dtype) -> SparseMlp:
    """The experts' matrices go one by one into two tensors of all of them."""
    names, hidden, inner = moe.names, config.hidden_size, moe.intermediate_size
    gate_up = torch.empty(moe.num_experts, 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(moe.num_experts, hidden, inner, dtype=dtype, device=device)
    for expert in range(moe.num_experts):
        for place, name in ((gate_up[expert, :inner], names.gate), (gate_up[expert, inner:], names.up)):
            place.copy_(reader.read(f"{prefix}{names.expert(expert, name)}.weight", (inner, hidden), device))
        down[expert].copy_(reader.read(f"{prefix}{names.expert(expert, names.down)}.weight", (hidden, inner), device))
    router = Product(reader.read(f"{prefix}{names.router}.weight", (moe.num_experts, hidden), device), None)
    return SparseMlp(moe, router, gate_up, down)
