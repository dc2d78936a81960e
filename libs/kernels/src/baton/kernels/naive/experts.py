"""A mixture of experts: routing, the grouped product, the sum of what the experts say."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def naive_moe_route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [n, experts] -> weights [n, k] float32, experts [n, k] int32, sorted_index [n * k] int32, offsets [experts + 1] int32.

    weights: softmax over all experts in float32, of the top_k most probable (the lower id among equals), most probable first; renormalize:
    divided by their sum. An assignment is the number token * k + place; sorted_index holds all of them by expert, in order within one, and
    offsets[e] to offsets[e + 1] are those of expert e.
    """
    num_experts = logits.shape[1]
    chosen = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights, experts = logits.float().softmax(dim=-1).gather(-1, chosen), chosen.to(torch.int32).contiguous()
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    owners = experts.flatten().sort(stable=True)
    offsets = torch.searchsorted(owners.values, torch.arange(num_experts + 1, dtype=torch.int32, device=logits.device)).to(torch.int32)
    return weights, experts, owners.indices.to(torch.int32), offsets


def naive_grouped_linear(x: Tensor, weight: Tensor, sorted_index: Tensor, offsets: Tensor, *, invariant: bool = False) -> Tensor:
    """Each assignment's row of x through its expert's weight [experts, out, h]; [n * k, out], in the order of assignments (not sorted).

    x [n, h]: a token's row for all its k assignments; or [n * k, h]: a row an assignment. sorted_index, offsets: of `moe_route`.
    invariant: of the kernel's tiles; the result is the same but for rounding.
    """
    places = sorted_index.long()
    fan = len(places) // len(x)
    output = torch.empty(len(places), weight.shape[1], dtype=x.dtype, device=x.device)
    bounds = offsets.tolist()
    for expert, (first, last) in enumerate(pairwise(bounds)):
        rows = places[first:last]
        output[rows] = (x[rows // fan].float() @ weight[expert].float().T).to(x.dtype)
    return output


def naive_moe_combine(outputs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """outputs [n * k, h] in the order of assignments, weights [n, k] float32 -> the weighted sums [n, h] in outputs' dtype.

    Each expert's part is rounded to the dtype, and so is the sum; then residual [n, h] is added, where there is one.
    """
    parts = (outputs.view(*weights.shape, -1).float() * weights.unsqueeze(-1)).to(outputs.dtype)
    total = parts.float().sum(dim=1).to(outputs.dtype)
    return total if residual is None else total + residual
