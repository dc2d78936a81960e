"""RMS norm: a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import await_predecessor


def launch_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, hidden = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return output
    block = triton.next_power_of_2(hidden)
    target = x if residual is None else residual
    _norm_kernel[(num_rows,)](
        x,
        target,
        weight,
        output,
        eps,
        x.stride(0),
        target.stride(0),
        hidden=hidden,
        block=block,
        add=residual is not None,
        chained=is_chained(),
        launch_pdl=is_chained(),
        num_warps=min(16, max(1, block // 512)),
    )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, output, eps, x_stride, residual_stride, hidden: tl.constexpr, block: tl.constexpr, add: tl.constexpr, chained: tl.constexpr
):
    await_predecessor(chained)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    there = column < hidden
    value = tl.load(x + row * x_stride + column, mask=there, other=0.0)
    if add:
        place = residual + row * residual_stride + column
        value = (value.to(tl.float32) + tl.load(place, mask=there, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(place, value, mask=there)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    normed = (wide * factor).to(value.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    tl.store(output + row * hidden + column, scaled.to(value.dtype), mask=there)
