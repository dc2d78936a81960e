"""Matrix products of few rows, which stream the weight, and products of any number of rows in one fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import allow_successor, await_written, fetch_lines
from baton.kernels.device.linear_sum import launch_sum, launch_sum_norm
from baton.kernels.device.norm import launch_rms_norm

#: Row tiles that run at about the same time, so that they find each other's weight tiles in the cache.
GROUP = tl.constexpr(8)
#: Bytes of a weight that a chained launch fetches while the launches before it still run. A decode step of Qwen3-8B on an H200 with 0, 4 and 16 MiB:
#: 4.20, 4.17 and 4.23 ms.
FETCHED_BYTES = 4 << 20
#: What one prefetch instruction fetches.
LINE_BYTES = 128


@dataclass(frozen=True, slots=True)
class LinearTiling:
    """columns: of the result, a program; depth: of the sum, in one go; splits: programs that share one sum, added up by a second kernel."""

    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int


def default_tiling(num_rows: int, width: int, depth: int, itemsize: int) -> LinearTiling:
    """width: of the result; depth: of the sum. Up to 16 rows all get the same: no result depends on the number of rows."""
    if itemsize > 2:
        return LinearTiling(columns=32, depth=64, splits=1, num_warps=4, num_stages=2)
    if num_rows > 16:
        return _tiling_of_many(width, depth)
    if width > 65536:
        return LinearTiling(columns=64, depth=128, splits=1, num_warps=4, num_stages=4)  # a vocabulary: 0.290 ms on an H200, 0.299 with the next
    # Seen on an H200 at Qwen3-8B's shapes with 1 and with 16 rows: 49 and 49 us (twice 12,288 outputs of 4,096), 28 and 29 (4,096 of 12,288),
    # 12 and 13 (4,096 of 4,096); the library took 49 and 51, 29 and 28, 13 and 13.
    if width > 8192:
        return LinearTiling(columns=32, depth=128, splits=1, num_warps=4, num_stages=3)
    if width >= 6144:
        return LinearTiling(columns=32, depth=128, splits=1, num_warps=4, num_stages=6)
    if width >= 3072 and depth >= 2048:
        return LinearTiling(columns=64, depth=128, splits=4, num_warps=4, num_stages=4)
    splits = 1
    while splits < 8 and width // 16 * splits < 192 and depth // (2 * splits) >= 512:
        splits *= 2
    return LinearTiling(columns=16, depth=256, splits=splits, num_warps=4, num_stages=5)


def _tiling_of_many(width: int, depth: int) -> LinearTiling:
    """For 17 to 64 rows. With 64 at Qwen3-8B's shapes, on an H200: 0.315 instead of 0.344 ms (a vocabulary), 40 instead of 47 us (4,096 of 12,288),
    20 instead of 21 us (4,096 of 4,096)."""
    if width > 65536:
        return LinearTiling(columns=128, depth=64, splits=1, num_warps=8, num_stages=5)
    if width > 8192:
        return LinearTiling(columns=64, depth=128, splits=1, num_warps=4, num_stages=4)
    if 3072 <= width < 6144 and depth >= 2048:
        return LinearTiling(columns=64, depth=128, splits=2, num_warps=4, num_stages=4)
    return LinearTiling(columns=32, depth=128, splits=1, num_warps=4, num_stages=4)


def _rows_of_few(num_rows: int) -> int:
    """Of a tile that holds them all: one tile for 1 to 16."""
    return 16 if num_rows <= 16 else int(triton.next_power_of_2(num_rows))


def launch_linear_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    out: Tensor | None,
    tiling: LinearTiling | None = None,
) -> Tensor:
    num_rows, depth = x.shape
    width = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    tiling = tiling or default_tiling(num_rows, width, depth, x.element_size())
    output = torch.empty(num_rows, width, dtype=x.dtype, device=x.device) if out is None else out
    partial = _launch(x, weight, bias, residual, silu_mul, output, tiling, _rows_of_few(num_rows))
    if partial is not None:
        launch_sum(partial, bias, residual, output, silu_mul)
    return output


def launch_linear_few_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float, tiling: LinearTiling | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, depth = x.shape
    tiling = tiling or default_tiling(num_rows, weight.shape[0], depth, x.element_size())
    output = torch.empty(num_rows, weight.shape[0], dtype=x.dtype, device=x.device)
    partial = _launch(x, weight, bias, residual, False, output, tiling, _rows_of_few(num_rows))
    if partial is None:
        return output, launch_rms_norm(output, None, norm, eps)
    return output, launch_sum_norm(partial, bias, residual, output, norm, eps)


def launch_linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Tiles of 64 rows or a multiple: on Hopper the same matrix instruction for any number of rows, and one running sum an element."""
    output = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    if len(x) == 0:
        return output
    if x.element_size() > 2:
        tiling, rows = LinearTiling(columns=32, depth=32, splits=1, num_warps=4, num_stages=2), 64
    elif len(x) <= 64:
        tiling, rows = LinearTiling(columns=32, depth=128, splits=1, num_warps=4, num_stages=4), 64
    else:
        tiling, rows = LinearTiling(columns=128, depth=64, splits=1, num_warps=8, num_stages=4), 128
    _launch(x, weight, bias, None, False, output, tiling, rows)
    return output


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    output: Tensor,
    tiling: LinearTiling,
    rows: int,
) -> Tensor | None:
    """Writes `output`; or, where programs share a sum, returns what each found, [splits, rows, outputs of weight] float32, to be added up."""
    num_rows, depth = x.shape
    width = output.shape[1]
    splits = tiling.splits
    columns = min(tiling.columns, max(16, triton.next_power_of_2(width)))
    step = min(tiling.depth, max(16, triton.next_power_of_2(depth)))
    target = output
    if splits > 1:
        target = torch.empty(splits, num_rows, weight.shape[0], dtype=torch.float32, device=x.device)
    share = triton.cdiv(triton.cdiv(depth, splits), step) * step
    grid = (triton.cdiv(width, columns), triton.cdiv(num_rows, rows), splits)
    of_line = LINE_BYTES // weight.element_size()
    _linear_kernel[grid](
        x,
        weight,
        output if bias is None else bias,
        output if residual is None else residual,
        target,
        num_rows,
        width,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        output.stride(0),
        depth=depth,
        share=share,
        masked=splits * share != depth,
        split=splits > 1,
        with_bias=bias is not None,
        with_residual=residual is not None,
        silu_mul=silu_mul,
        rows=rows,
        columns=columns,
        step=step,
        of_line=of_line,
        num_lines=_lines_ahead(grid[0] * splits * columns * (2 if silu_mul else 1), share, of_line),
        chained=is_chained(),
        launch_pdl=is_chained(),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return target if splits > 1 else None


def _lines_ahead(num_starts: int, share: int, of_line: int) -> int:
    """Lines that are fetched from each of the places in a weight where a program begins: a power of two."""
    lines = min(share // of_line, FETCHED_BYTES // (LINE_BYTES * num_starts))
    return 1 << max(0, lines.bit_length() - 1)


# One compiled kernel serves any number of rows.
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _linear_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    residual,
    output,
    num_rows,
    width,
    x_stride,
    weight_stride,
    residual_stride,
    output_stride,
    depth: tl.constexpr,
    share: tl.constexpr,
    masked: tl.constexpr,
    split: tl.constexpr,
    with_bias: tl.constexpr,
    with_residual: tl.constexpr,
    silu_mul: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    of_line: tl.constexpr,
    num_lines: tl.constexpr,
    chained: tl.constexpr,
):
    row_tile, column_tile = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), GROUP)
    row = row_tile * rows + tl.arange(0, rows)
    column = column_tile * columns + tl.arange(0, columns)
    part = tl.program_id(2)
    lane = tl.arange(0, step)
    row_there = row < num_rows
    column_there = column < width
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + column.to(tl.int64)[:, None] * weight_stride
    up_rows = weight + (column + width).to(tl.int64)[:, None] * weight_stride
    begin = part * share
    if chained:
        # The weight is known before the row is: its first lines come while the launches before this one still run.
        line = tl.minimum(begin + tl.arange(0, num_lines) * of_line, depth - 1)
        known = tl.minimum(column, width - 1)
        fetch_lines(weight + known.to(tl.int64)[:, None] * weight_stride + line[None, :])
        if silu_mul:
            fetch_lines(weight + (known + width).to(tl.int64)[:, None] * weight_stride + line[None, :])
        await_written()
    total = tl.zeros((rows, columns), tl.float32)
    up_total = tl.zeros((rows, columns), tl.float32)
    # A fixed number of rounds: the loop's bounds are known when it is compiled.
    for offset in range(0, share, step):
        place = begin + offset + lane
        x_mask = row_there[:, None]
        weight_mask = column_there[:, None]
        if masked:
            x_mask = x_mask & (place < depth)[None, :]
            weight_mask = weight_mask & (place < depth)[None, :]
        left = tl.load(x_rows + place[None, :], mask=x_mask, other=0.0)
        right = tl.load(weight_rows + place[None, :], mask=weight_mask, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        if silu_mul:
            up = tl.load(up_rows + place[None, :], mask=weight_mask, other=0.0)
            up_total = tl.dot(left, tl.trans(up), up_total, input_precision="ieee")

    if chained:
        # Not before: what is set up early holds room on the multiprocessors that this launch's own programs need (seen on an H200: 28 us become 43).
        allow_successor()
    mask = row_there[:, None] & column_there[None, :]
    wide_row = row.to(tl.int64)
    if split:
        stride = 2 * width if silu_mul else width
        partial = output + (part.to(tl.int64) * num_rows + wide_row[:, None]) * stride + column[None, :]
        tl.store(partial, total, mask=mask)
        if silu_mul:
            tl.store(partial + width, up_total, mask=mask)
    else:
        if with_bias:
            total += tl.load(bias + column, mask=column_there, other=0.0).to(tl.float32)[None, :]
            if silu_mul:
                up_total += tl.load(bias + width + column, mask=column_there, other=0.0).to(tl.float32)[None, :]
        dtype = output.dtype.element_ty
        result = total.to(dtype)
        if silu_mul:
            gate = result.to(tl.float32)
            activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
            result = (activated * up_total.to(dtype).to(tl.float32)).to(dtype)
        if with_residual:
            before = tl.load(residual + wide_row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0)
            result = (result.to(tl.float32) + before.to(tl.float32)).to(dtype)
        tl.store(output + wide_row[:, None] * output_stride + column[None, :], result, mask=mask)
