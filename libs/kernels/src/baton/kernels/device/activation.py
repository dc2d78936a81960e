"""silu(gate) * up: a program a block of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import await_predecessor

BLOCK = 1024


def launch_silu_mul(gate_up: Tensor) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows and width:
        _silu_mul_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            gate_up, output, gate_up.stride(0), width, block=BLOCK, chained=is_chained(), launch_pdl=is_chained(), num_warps=4
        )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(gate_up, output, stride, width, block: tl.constexpr, chained: tl.constexpr):  # type: ignore[no-untyped-def]
    await_predecessor(chained)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < width
    gate = tl.load(gate_up + row * stride + column, mask=there, other=0.0)
    up = tl.load(gate_up + row * stride + width + column, mask=there, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(output + row * width + column, (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=there)
