"""Adds up what several programs found for one sum, in a fixed order, and finishes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import await_predecessor

BLOCK = 512


def launch_sum(
    partial: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    output: Tensor,
    silu_mul: bool,
) -> None:
    """partial [splits, rows, columns] float32 -> output [rows, width]."""
    splits, num_rows, _ = partial.shape
    width = output.shape[1]
    _sum_kernel[(num_rows, triton.cdiv(width, BLOCK))](
        partial,
        output if bias is None else bias,
        output if residual is None else residual,
        output,
        num_rows,
        width,
        0 if residual is None else residual.stride(0),
        output.stride(0),
        splits=splits,
        with_bias=bias is not None,
        with_residual=residual is not None,
        silu_mul=silu_mul,
        block=BLOCK,
        chained=is_chained(),
        launch_pdl=is_chained(),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    partial,
    bias,
    residual,
    output,
    num_rows,
    width,
    residual_stride,
    output_stride,
    splits: tl.constexpr,
    with_bias: tl.constexpr,
    with_residual: tl.constexpr,
    silu_mul: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
):
    await_predecessor(chained)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < width
    stride = 2 * width if silu_mul else width
    total = tl.zeros((block,), tl.float32)
    up_total = tl.zeros((block,), tl.float32)
    for part in range(splits):
        place = partial + (part * num_rows + row) * stride + column
        total += tl.load(place, mask=there, other=0.0)
        if silu_mul:
            up_total += tl.load(place + width, mask=there, other=0.0)
    if with_bias:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
        if silu_mul:
            up_total += tl.load(bias + width + column, mask=there, other=0.0).to(tl.float32)
    dtype = output.dtype.element_ty
    result = total.to(dtype)
    if silu_mul:
        gate = result.to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        result = (activated * up_total.to(dtype).to(tl.float32)).to(dtype)
    if with_residual:
        before = tl.load(residual + row * residual_stride + column, mask=there, other=0.0)
        result = (result.to(tl.float32) + before.to(tl.float32)).to(dtype)
    tl.store(output + row * output_stride + column, result, mask=there)


def launch_sum_norm(partial: Tensor, bias: Tensor | None, residual: Tensor, output: Tensor, norm: Tensor, eps: float) -> Tensor:
    """As `launch_sum` with a residual; returns the RMS norm of what it writes to `output`, [rows, width]."""
    splits, num_rows, width = partial.shape
    normed = torch.empty(num_rows, width, dtype=output.dtype, device=output.device)
    block = triton.next_power_of_2(width)
    _sum_norm_kernel[(num_rows,)](
        partial,
        output if bias is None else bias,
        residual,
        output,
        norm,
        normed,
        eps,
        num_rows,
        residual.stride(0),
        output.stride(0),
        splits=splits,
        with_bias=bias is not None,
        width=width,
        block=block,
        chained=is_chained(),
        launch_pdl=is_chained(),
        num_warps=min(16, max(1, block // 256)),
    )
    return normed


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _sum_norm_kernel(  # type: ignore[no-untyped-def]
    partial,
    bias,
    residual,
    output,
    norm,
    normed,
    eps,
    num_rows,
    residual_stride,
    output_stride,
    splits: tl.constexpr,
    with_bias: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
):
    """A program a row. Rounds where `_sum_kernel` and then the norm by itself would."""
    await_predecessor(chained)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    there = column < width
    before = tl.load(residual + row * residual_stride + column, mask=there, other=0.0)
    scale = tl.load(norm + column, mask=there, other=0.0)
    total = tl.zeros((block,), tl.float32)
    for part in tl.static_range(splits):
        total += tl.load(partial + (part * num_rows + row) * width + column, mask=there, other=0.0)
    if with_bias:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    dtype = output.dtype.element_ty
    result = (total.to(dtype).to(tl.float32) + before.to(tl.float32)).to(dtype)
    tl.store(output + row * output_stride + column, result, mask=there)
    wide = result.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    rounded = (wide * factor).to(dtype).to(tl.float32)
    tl.store(normed + row * width + column, (rounded * scale.to(tl.float32)).to(dtype), mask=there)
