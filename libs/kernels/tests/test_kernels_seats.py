"""What a decode step reads of seats and writes to them, against the naive twins."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE

from baton.kernels import can_chain, chain_launches, naive_seat_drawn, naive_seat_rows, seat_drawn, seat_rows

NUM_STOPS = 5


def seats(num_seats, num_pages, page_size, seed=7):
    """wide, small, real, table of `num_seats` and the padding seat; position 0 is a page's first, the last one the table's last."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    longest = num_pages * page_size
    wide = torch.stack([numbers(0, 1000, num_seats + 1), numbers(0, longest, num_seats + 1), numbers(-(2**63), 2**63 - 1, num_seats + 1)])
    wide[1, 0], wide[1, 1], wide[1, -1] = 0, longest - 1, 0
    free_from = wide[1] + numbers(0, 3, num_seats + 1)  # 0: before what is drawn for, 1: that, 2: behind it
    small = numbers(-1, 1000, 1 + NUM_STOPS, num_seats + 1).int()
    real = torch.rand(3, num_seats + 1, generator=generator)
    table = numbers(0, 2**20, num_seats + 1, num_pages).int()
    return tuple(each.to(DEVICE) for each in (torch.cat([wide, free_from[None]]), small, real, table))


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 1), (9, 16), (1500, 3)])
@pytest.mark.parametrize("num_rows", [1, 8, 200])
def test_seats_are_read_and_written_as_by_the_naive_twins(num_rows, num_pages, page_size):
    num_seats = 2 * num_rows + 2
    wide, small, real, table = seats(num_seats, num_pages, page_size)
    order = torch.randperm(num_seats, generator=torch.Generator().manual_seed(3))[:num_rows]
    order[: min(2, num_rows)] = torch.tensor([1, 0])[:num_rows]
    order[num_rows // 4 + 2 :: 2] = num_seats  # padding, the same seat many times
    batch = order.to(DEVICE)
    ours, theirs = (function(batch, wide, small, real, table, page_size) for function in (seat_rows, naive_seat_rows))
    for name, got, expected in zip(ours._fields, ours, theirs, strict=True):
        assert got.dtype is expected.dtype
        assert torch.equal(got, expected), name
    live = batch < num_seats
    assert bool((ours.slot[~live] == -1).all())
    assert bool((ours.slot[live] >= 0).all())

    drawn = torch.arange(num_rows, device=DEVICE) - 1  # the first row could draw nothing
    our_wide, their_wide = wide.clone(), wide.clone()
    our_out, their_out = torch.empty_like(drawn), torch.empty_like(drawn)
    seat_drawn(batch, drawn, ours.after, our_wide, our_out)
    naive_seat_drawn(batch, drawn, ours.after, their_wide, their_out)
    assert torch.equal(our_out, their_out)
    assert torch.equal(our_wide[:, :-1], their_wide[:, :-1])
    assert our_wide[1, -1] == their_wide[1, -1] == 0
    assert our_wide[0, batch[0]] == 0
    assert torch.equal(our_wide[2:], wide[2:])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter launches nothing")
def test_a_captured_chain_goes_on_from_step_to_step():
    if not can_chain(torch.device("cuda")):
        pytest.skip("this GPU cannot chain launches")
    wide, small, real, table = seats(40, 9, 16)
    wide[1, :40] = torch.arange(40, device=DEVICE)
    batch = torch.cat([torch.arange(24, device=DEVICE), torch.full((8,), 40, device=DEVICE)])
    begun, out = wide.clone(), torch.zeros_like(batch)

    def step():
        rows = seat_rows(batch, wide, small, real, table, 16)
        seat_drawn(batch, rows.slot + 1, rows.after, wide, out)

    with chain_launches():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        wide.copy_(begun)
        for _ in range(20):
            expected = naive_seat_rows(batch, wide, small, real, table, 16).slot + 1
            graph.replay()
            assert torch.equal(out, expected)
    assert torch.equal(wide[1, :24], begun[1, :24] + 20)


def test_what_does_not_fit_is_refused():
    wide, small, real, table = seats(3, 4, 16)
    batch = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"batch is torch.int32; it must be torch.int64"):
        seat_rows(batch.int(), wide, small, real, table, 16)
    with pytest.raises(ValueError, match=r"table has shape \[3, 4\]; it must be \[4, any\]"):
        seat_rows(batch, wide, small, real, table[:3], 16)
    with pytest.raises(ValueError, match="page_size = 0"):
        seat_rows(batch, wide, small, real, table, 0)
    with pytest.raises(ValueError, match=r"after has shape \[1\]; it must be \[2\]"):
        seat_drawn(batch, batch, batch[:1], wide, batch)
