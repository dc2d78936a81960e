"""Routing to experts, and the weighted sum of their outputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SORT_BLOCK = 1024
COMBINE_BLOCK = 1024


def launch_route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    sorted_index = torch.empty(num_tokens * top_k, dtype=torch.int32, device=logits.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=logits.device)
    if num_tokens:
        _top_kernel[(num_tokens,)](
            logits,
            weights,
            experts,
            logits.stride(0),
            num_experts=num_experts,
            width=triton.next_power_of_2(num_experts),
            top_k=top_k,
            places=triton.next_power_of_2(top_k),
            renormalize=renormalize,
            num_warps=1,
        )
    _sort_kernel[(num_experts,)](experts, sorted_index, offsets, num_tokens * top_k, num_experts=num_experts, block=SORT_BLOCK, num_warps=4)
    return weights, experts, sorted_index, offsets


@triton.jit  # type: ignore[untyped-decorator]
def _top_kernel(  # type: ignore[no-untyped-def]
    logits,
    weights,
    experts,
    stride,
    num_experts: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    places: tl.constexpr,
    renormalize: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, width)
    place = tl.arange(0, places)
    known = lane < num_experts
    value = tl.load(logits + token * stride + lane, mask=known, other=float("-inf")).to(tl.float32)
    largest = tl.max(value, axis=0)
    mass = tl.exp(value - largest)
    total = tl.sum(mass, axis=0)
    chosen_weights = tl.zeros((places,), tl.float32)
    chosen = tl.zeros((places,), tl.int32)
    left = known
    for index in range(top_k):
        # The lowest id among the largest that are left. Where all is NaN the last expert stands in: a number of no expert would lead
        # the grouped product out of its memory, and such a row's token is refused by the sampler anyway.
        top = tl.max(tl.where(left, value, float("-inf")), axis=0)
        expert = tl.min(tl.where(left & (value == top), lane, num_experts - 1), axis=0)
        weight = tl.sum(tl.where(lane == expert, mass, 0.0), axis=0) / total
        chosen_weights = tl.where(place == index, weight, chosen_weights)
        chosen = tl.where(place == index, expert, chosen)
        left = left & (lane != expert)
    if renormalize:
        chosen_weights = chosen_weights / tl.sum(chosen_weights, axis=0)
    tl.store(weights + token * top_k + place, chosen_weights, mask=place < top_k)
    tl.store(experts + token * top_k + place, chosen, mask=place < top_k)


@triton.jit(do_not_specialize=["assignments"])  # type: ignore[untyped-decorator]
def _sort_kernel(experts, sorted_index, offsets, assignments, num_experts: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program an expert: counts what comes before its assignments, then lists them in order."""
    mine = tl.program_id(0)
    lane = tl.arange(0, block)
    before = tl.zeros((block,), tl.int32)
    for start in range(0, assignments, block):
        expert = tl.load(experts + start + lane, mask=start + lane < assignments, other=num_experts)
        before += (expert < mine).to(tl.int32)
    cursor = tl.sum(before, axis=0)
    tl.store(offsets + mine, cursor)
    for start in range(0, assignments, block):
        expert = tl.load(experts + start + lane, mask=start + lane < assignments, other=num_experts)
        hit = (expert == mine).to(tl.int32)
        place = cursor + tl.cumsum(hit, axis=0) - 1
        tl.store(sorted_index + place, start + lane, mask=hit != 0)
        cursor += tl.sum(hit, axis=0)
    if mine == num_experts - 1:
        tl.store(offsets + num_experts, assignments)


def launch_combine(outputs: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    num_tokens, top_k = weights.shape
    hidden = outputs.shape[1]
    combined = torch.empty(num_tokens, hidden, dtype=outputs.dtype, device=outputs.device)
    if num_tokens:
        _combine_kernel[(num_tokens, triton.cdiv(hidden, COMBINE_BLOCK))](
            outputs,
            weights,
            outputs if residual is None else residual,
            combined,
            hidden,
            0 if residual is None else residual.stride(0),
            top_k=top_k,
            with_residual=residual is not None,
            block=COMBINE_BLOCK,
            num_warps=4,
        )
    return combined


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    outputs, weights, residual, combined, hidden, residual_stride, top_k: tl.constexpr, with_residual: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < hidden
    dtype = combined.dtype.element_ty
    total = tl.zeros((block,), tl.float32)
    for place in range(top_k):
        part = tl.load(outputs + (token * top_k + place) * hidden + column, mask=there, other=0.0).to(tl.float32)
        total += (part * tl.load(weights + token * top_k + place)).to(dtype).to(tl.float32)
    result = total.to(dtype)
    if with_residual:
        before = tl.load(residual + token * residual_stride + column, mask=there, other=0.0)
        result = (result.to(tl.float32) + before.to(tl.float32)).to(dtype)
    tl.store(combined + token * hidden + column, result, mask=there)
