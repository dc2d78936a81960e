"""What a decode step reads of its sequences' seats before the layers, and writes there behind them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Rows of `wide` and of `real`; `small` has top_k, then the stop tokens.
TOKEN, POSITION, SEED, FREE_FROM = range(4)
TOP_K = 0
TEMPERATURE, TOP_P, MIN_P = range(3)


class SeatRows(NamedTuple):
    """Of each row of a batch. token, position, slot, after, seed [n] int64; length, top_k [n] int32; temperature, top_p, min_p [n] float32;
    pages [n, pages of the table] int32; forbidden [n, stops] int32."""

    token: Tensor
    position: Tensor
    slot: Tensor
    after: Tensor
    seed: Tensor
    length: Tensor
    pages: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    forbidden: Tensor


def naive_seat_rows(batch: Tensor, wide: Tensor, small: Tensor, real: Tensor, table: Tensor, page_size: int) -> SeatRows:
    """Of each seat of `batch` [n] int64, for the token that it computes next. The last seat is for padding: its rows have slot -1 and length 0.

    wide [4, seats] int64: token, position, seed, and the position from which stop tokens may be drawn. small [1 + stops, seats] int32: top_k,
    stop tokens (-1: none). real [3, seats] float32: temperature, top_p, min_p. table [seats, pages] int32.
    slot: where the position lies in the pool. length: tokens that the row sees, itself included. pages: of those tokens, then 0. after: the position
    that is drawn for. forbidden: the stop tokens while they may not be drawn, else -1.
    """
    live = batch < wide.shape[1] - 1
    token, position, seed, free_from = (row.contiguous() for row in wide[:, batch])
    after = position + 1
    length = torch.where(live, after, 0)
    num_pages = (length + page_size - 1) // page_size
    within = torch.arange(table.shape[1], device=table.device) < num_pages[:, None]
    pages = torch.where(within, table[batch], 0)
    page = table[batch].gather(1, (position // page_size)[:, None])[:, 0]
    slot = torch.where(live, page * page_size + position % page_size, -1)
    top_k, stops = small[TOP_K, batch], small[1:, batch]
    forbidden = torch.where(after < free_from, stops, -1).t().contiguous()
    temperature, top_p, min_p = real[:, batch]
    return SeatRows(token, position, slot, after, seed, length.int(), pages, temperature, top_k, top_p, min_p, forbidden)


def naive_seat_drawn(batch: Tensor, drawn: Tensor, after: Tensor, wide: Tensor, out: Tensor) -> None:
    """Each seat of `batch` goes on with its token and position: drawn, after [n] int64 into `wide` (of `naive_seat_rows`), in place.

    -1 (nothing could be drawn) becomes token 0, which may be looked up. The padding seat keeps position 0; its token is any. out [n] int64: a copy
    of `drawn`.
    """
    out.copy_(drawn)
    wide[TOKEN].index_copy_(0, batch, drawn.clamp(min=0))
    wide[POSITION].index_copy_(0, batch, torch.where(batch < wide.shape[1] - 1, after, 0))
