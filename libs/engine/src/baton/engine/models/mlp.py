"""What follows attention in a layer: one gated MLP, or a router and many of them."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from baton.engine.linear import Linear, Tuning
from baton.engine.model_config import ModelConfig, MoeConfig
from baton.engine.models.reading import LayerReader, Projection


class Mlp(Protocol):
    """rows [n, hidden] -> [n, hidden]."""

    def __call__(self, rows: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """residual [n, hidden] + the result; may overwrite `residual`: use only what is returned."""


class GatedMlp:
    """gate_up: gate, then up."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, rows: Tensor) -> Tensor:
        return self._down(self._inner(rows))

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return self._down.add_to(residual, self._inner(rows))

    def _inner(self, rows: Tensor) -> Tensor:
        gate, up = self._gate_up(rows).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class SparseMlp:
    """Each row goes through the best `experts_per_token` experts, weighted by the router. router: [experts, hidden]."""

    def __init__(self, moe: MoeConfig, router: Tensor, experts: list[GatedMlp]) -> None:
        self._moe = moe
        self._router = router
        self._experts = experts

    def __call__(self, rows: Tensor) -> Tensor:
        weights, chosen = route(self._moe, F.linear(rows, self._router))
        per_row = self._moe.experts_per_token
        # (row, rank) pairs in the order of their experts: every expert meets its rows once, side by side.
        order = chosen.flatten().argsort(stable=True)
        sizes = chosen.flatten().bincount(minlength=self._moe.num_experts).tolist()
        groups = rows[order // per_row].split_with_sizes(sizes)
        parts = [expert(group) for expert, group in zip(self._experts, groups, strict=True) if len(group)]
        outputs = torch.empty(len(order), rows.shape[1], dtype=torch.float32).index_copy_(0, order, torch.cat(parts).float())
        # Summed in float32 and by rank: a row's sum does not depend on which experts other rows chose.
        return torch.bmm(weights.unsqueeze(1), outputs.view(len(rows), per_row, -1)).squeeze(1).to(rows.dtype)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return residual.add_(self(rows))


def route(moe: MoeConfig, scores: Tensor) -> tuple[Tensor, Tensor]:
    """scores [rows, experts] of the router -> weights float32 and experts int64, both [rows, experts_per_token], best first."""
    weights, chosen = torch.softmax(scores, dim=-1, dtype=torch.float32).topk(moe.experts_per_token, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) if moe.renormalize else weights), chosen


def read_mlp(config: ModelConfig, tensors: LayerReader, layer: int, tuning: Tuning) -> Mlp:
    if config.moe is not None and config.is_sparse(layer):
        return _read_experts(config.moe, tensors, config.hidden_size)
    return _read_gated(
        tensors, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), config.hidden_size, config.intermediate_size, config.mlp_bias, tuning
    )


def _read_experts(moe: MoeConfig, tensors: LayerReader, hidden_size: int) -> SparseMlp:
    names = moe.names
    router = tensors.matrix(names.router, moe.num_experts, hidden_size)
    experts = []
    for index in range(moe.num_experts):
        matrices = names.expert(index, names.gate), names.expert(index, names.up), names.expert(index, names.down)
        # An expert meets a fraction of a prompt's rows, so one copy of its weights, for few rows, serves every role.
        experts.append(_read_gated(tensors, matrices, hidden_size, moe.intermediate_size, False, Tuning.FEW_ROWS))
    return SparseMlp(moe, router, experts)


def _read_gated(tensors: LayerReader, names: tuple[str, str, str], hidden: int, inner: int, has_bias: bool, tuning: Tuning) -> GatedMlp:
    gate, up, down = names
    return GatedMlp(
        tensors.fused([Projection(gate, inner), Projection(up, inner)], hidden, has_bias=has_bias, tuning=tuning),
        tensors.linear(down, hidden, inner, has_bias=has_bias, tuning=tuning),
    )
