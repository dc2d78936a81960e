"""Each expert's rows through its weight, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch_grouped_linear(x: Tensor, weight: Tensor, sorted_index: Tensor, offsets: Tensor, invariant: bool) -> Tensor:
    num_experts, width, depth = weight.shape
    assignments = len(sorted_index)
    output = torch.empty(assignments, width, dtype=x.dtype, device=x.device)
    if x.element_size() > 2:
        rows, columns, step, warps, stages = 16, 32, 32, 4, 2
    elif assignments <= 16 * num_experts and not invariant:
        rows, columns, step, warps, stages = 16, 64, 128, 4, 4
    elif assignments <= 64 * num_experts:
        rows, columns, step, warps, stages = 64, 128, 64, 4, 4
    else:
        rows, columns, step, warps, stages = 128, 128, 64, 8, 4
    # As many tiles as there can be: full ones, and a begun one for each expert that can have any. A tile too many returns at once.
    tiles = triton.cdiv(assignments, rows) + min(num_experts, assignments)
    _grouped_kernel[(triton.cdiv(width, columns), tiles)](
        x,
        weight,
        sorted_index,
        offsets,
        output,
        width,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        fan=assignments // len(x),
        num_experts=num_experts,
        experts=triton.next_power_of_2(num_experts),
        depth=depth,
        rows=rows,
        columns=columns,
        step=min(step, max(16, triton.next_power_of_2(depth))),
        num_warps=warps,
        num_stages=stages,
    )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _grouped_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    sorted_index,
    offsets,
    output,
    width,
    x_stride,
    expert_stride,
    weight_stride,
    fan: tl.constexpr,
    num_experts: tl.constexpr,
    experts: tl.constexpr,
    depth: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    tile = tl.program_id(1)
    lane = tl.arange(0, experts)
    known = lane < num_experts
    firsts = tl.load(offsets + lane, mask=known, other=0)
    lasts = tl.load(offsets + lane + 1, mask=known, other=0)
    tiles_of = (lasts - firsts + rows - 1) // rows
    tiles_upto = tl.cumsum(tiles_of, axis=0)
    if tile >= tl.sum(tiles_of, axis=0):
        return
    expert = tl.sum(((tiles_upto <= tile) & known).to(tl.int32), axis=0)
    mine = lane == expert
    tile_of_expert = tile - tl.sum(tl.where(mine, tiles_upto - tiles_of, 0), axis=0)
    first = tl.sum(tl.where(mine, firsts, 0), axis=0) + tile_of_expert * rows
    last = tl.sum(tl.where(mine, lasts, 0), axis=0)

    place = first + tl.arange(0, rows)
    there = place < last
    assignment = tl.load(sorted_index + place, mask=there, other=0).to(tl.int64)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    column_there = column < width
    depth_lane = tl.arange(0, step)
    x_rows = x + (assignment // fan)[:, None] * x_stride
    weight_rows = weight + expert.to(tl.int64) * expert_stride + column.to(tl.int64)[:, None] * weight_stride
    total = tl.zeros((rows, columns), tl.float32)
    for offset in range(0, depth, step):
        at = offset + depth_lane
        x_mask = there[:, None]
        weight_mask = column_there[:, None]
        if depth % step != 0:
            x_mask = x_mask & (at < depth)[None, :]
            weight_mask = weight_mask & (at < depth)[None, :]
        left = tl.load(x_rows + at[None, :], mask=x_mask, other=0.0)
        right = tl.load(weight_rows + at[None, :], mask=weight_mask, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    target = output + assignment[:, None] * width + column[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=there[:, None] & column_there[None, :])
