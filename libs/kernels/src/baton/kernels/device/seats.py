"""Seats of a decode step: a program for some pages of a row before the layers, one for many rows behind them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import await_predecessor
from baton.kernels.naive.seats import SeatRows

#: Pages that a program copies, and rows that one goes on with.
PAGES, ROWS = 1024, 128


def launch_seat_rows(batch: Tensor, wide: Tensor, small: Tensor, real: Tensor, table: Tensor, page_size: int) -> SeatRows:
    num_rows, num_stops, num_pages = len(batch), small.shape[0] - 1, table.shape[1]

    def column(dtype: torch.dtype, *more: int) -> Tensor:
        return torch.empty(num_rows, *more, dtype=dtype, device=batch.device)

    # One allocation each, so that all begin where a kernel likes them to.
    token, position, slot, after, seed = (column(torch.int64) for _ in range(5))
    length, top_k = column(torch.int32), column(torch.int32)
    temperature, top_p, min_p = (column(torch.float32) for _ in range(3))
    rows = SeatRows(
        token, position, slot, after, seed, length, column(torch.int32, num_pages), temperature, top_k, top_p, min_p, column(torch.int32, num_stops)
    )
    if num_rows == 0:
        return rows
    block = min(PAGES, triton.next_power_of_2(num_pages))
    _rows_kernel[(num_rows, triton.cdiv(num_pages, block))](
        batch,
        wide,
        small,
        real,
        table,
        *rows,
        wide.stride(0),
        small.stride(0),
        real.stride(0),
        table.stride(0),
        wide.shape[1] - 1,
        num_pages,
        num_stops=num_stops,
        page_size=page_size,
        block=block,
        lanes=triton.next_power_of_2(num_stops),
        chained=is_chained(),
        launch_pdl=is_chained(),
        num_warps=4,
    )
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def _rows_kernel(  # type: ignore[no-untyped-def]
    batch,
    wide,
    small,
    real,
    table,
    token_of,
    position_of,
    slot_of,
    after_of,
    seed_of,
    length_of,
    pages_of,
    temperature_of,
    top_k_of,
    top_p_of,
    min_p_of,
    forbidden_of,
    wide_stride,
    small_stride,
    real_stride,
    table_stride,
    padding,
    num_pages,
    num_stops: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    chained: tl.constexpr,
):
    await_predecessor(chained)
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(batch + row)
    live = seat < padding
    position = tl.load(wide + wide_stride + seat)
    after = position + 1
    pages = table + seat * table_stride
    page = tl.program_id(1) * block + tl.arange(0, block)
    num_seen = tl.where(live, position // page_size + 1, 0)
    seen = tl.load(pages + page, mask=page < num_seen, other=0)  # never beyond the table: the position lies in it
    tl.store(pages_of + row * num_pages + page, seen, mask=page < num_pages)
    if tl.program_id(1) == 0:
        tl.store(token_of + row, tl.load(wide + seat))
        tl.store(position_of + row, position)
        tl.store(after_of + row, after)
        tl.store(seed_of + row, tl.load(wide + 2 * wide_stride + seat))
        slot = tl.load(pages + position // page_size).to(tl.int64) * page_size + position % page_size
        tl.store(slot_of + row, tl.where(live, slot, -1))
        tl.store(length_of + row, tl.where(live, after, 0).to(tl.int32))
        tl.store(temperature_of + row, tl.load(real + seat))
        tl.store(top_p_of + row, tl.load(real + real_stride + seat))
        tl.store(min_p_of + row, tl.load(real + 2 * real_stride + seat))
        tl.store(top_k_of + row, tl.load(small + seat))
        lane = tl.arange(0, lanes)
        stop = tl.load(small + (1 + lane) * small_stride + seat, mask=lane < num_stops, other=-1)
        free_from = tl.load(wide + 3 * wide_stride + seat)
        tl.store(forbidden_of + row * num_stops + lane, tl.where(after < free_from, stop, -1), mask=lane < num_stops)


def launch_seat_drawn(batch: Tensor, drawn: Tensor, after: Tensor, wide: Tensor, out: Tensor) -> None:
    num_rows = len(batch)
    if num_rows == 0:
        return
    _drawn_kernel[(triton.cdiv(num_rows, ROWS),)](
        batch,
        drawn,
        after,
        wide,
        out,
        wide.stride(0),
        wide.shape[1] - 1,
        num_rows,
        block=ROWS,
        chained=is_chained(),
        launch_pdl=is_chained(),
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _drawn_kernel(batch, drawn, after, wide, out, wide_stride, padding, num_rows, block: tl.constexpr, chained: tl.constexpr):  # type: ignore[no-untyped-def]
    await_predecessor(chained)
    row = tl.program_id(0) * block + tl.arange(0, block)
    there = row < num_rows
    seat = tl.load(batch + row, mask=there, other=0)
    token = tl.load(drawn + row, mask=there, other=0)
    position = tl.load(after + row, mask=there, other=0)
    tl.store(out + row, token, mask=there)
    tl.store(wide + seat, tl.maximum(token, 0), mask=there)
    tl.store(wide + wide_stride + seat, tl.where(seat < padding, position, 0), mask=there)
