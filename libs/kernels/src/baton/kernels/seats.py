"""A decode step's small reads and writes beside its layers: in one launch before them and one behind."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.dispatch import expect, expect_dense, runs_triton
from baton.kernels.naive import naive_seat_drawn, naive_seat_rows
from baton.kernels.naive.seats import SeatRows


def seat_rows(batch: Tensor, wide: Tensor, small: Tensor, real: Tensor, table: Tensor, page_size: int) -> SeatRows:
    """As `naive_seat_rows`. Raises ValueError."""
    expect("batch", batch, (-1,), torch.int64)
    expect("wide", wide, (4, -1), torch.int64)
    num_seats = wide.shape[1]
    expect("small", small, (-1, num_seats), torch.int32)
    expect("real", real, (3, num_seats), torch.float32)
    expect("table", table, (num_seats, -1), torch.int32)
    for name, tensor in (("batch", batch), ("wide", wide), ("small", small), ("real", real), ("table", table)):
        expect_dense(name, tensor)
    if small.shape[0] < 2:
        raise ValueError(f"small has {small.shape[0]} row(s); it must have top_k and at least one stop token")
    if page_size < 1:
        raise ValueError(f"page_size = {page_size}; it must be at least 1")
    if not runs_triton(batch):
        return naive_seat_rows(batch, wide, small, real, table, page_size)
    from baton.kernels.device.seats import launch_seat_rows

    return launch_seat_rows(batch, wide, small, real, table, page_size)


def seat_drawn(batch: Tensor, drawn: Tensor, after: Tensor, wide: Tensor, out: Tensor) -> None:
    """As `naive_seat_drawn`. Raises ValueError."""
    expect("batch", batch, (-1,), torch.int64)
    expect("wide", wide, (4, -1), torch.int64)
    for name, tensor in (("drawn", drawn), ("after", after), ("out", out)):
        expect(name, tensor, (len(batch),), torch.int64)
    for name, tensor in (("batch", batch), ("drawn", drawn), ("after", after), ("out", out), ("wide", wide)):
        expect_dense(name, tensor)
    if not runs_triton(batch):
        naive_seat_drawn(batch, drawn, after, wide, out)
        return
    from baton.kernels.device.seats import launch_seat_drawn

    launch_seat_drawn(batch, drawn, after, wide, out)
