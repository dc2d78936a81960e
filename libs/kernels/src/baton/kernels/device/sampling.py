"""Draws tokens: many programs a row find its largest logit, one finds the filters' edge, many run the race. No sort: edges are found by halving
over float bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import await_predecessor
from baton.kernels.device.philox import draw_key

#: Logits that a program looks at in one go.
BLOCK = 4096
#: The bits of infinity: every distance from the largest logit is at most this.
INFINITY_BITS = 0x7F800000


def launch_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    forbidden: Tensor | None,
) -> Tensor:
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    chained = is_chained()
    width = 0 if forbidden is None else forbidden.shape[1]
    # What stood where a token is forbidden, until it stands there again.
    aside = torch.empty(num_rows, width, dtype=logits.dtype, device=logits.device)
    forbidden = aside if forbidden is None else forbidden
    few = triton.next_power_of_2(max(width, 1))
    strides = (logits.stride(0), forbidden.stride(0))
    if width:
        _forbid_kernel[(num_rows,)](
            logits, forbidden, aside, *strides, vocab_size, width, block=few, chained=chained, launch_pdl=chained, num_warps=1
        )
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    chunks = triton.cdiv(vocab_size, block)
    best = torch.empty(num_rows, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, chunks, dtype=torch.int32, device=logits.device)
    num_warps = max(1, min(16, block // 256))
    _best_kernel[(chunks, num_rows)](
        logits, best, ids, logits.stride(0), vocab_size, block=block, chained=chained, launch_pdl=chained, num_warps=num_warps
    )
    largest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    edge = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    lanes = triton.next_power_of_2(chunks)
    _edge_kernel[(num_rows,)](
        logits,
        best,
        ids,
        temperature,
        top_k,
        top_p,
        min_p,
        largest,
        edge,
        tokens,
        logits.stride(0),
        vocab_size=vocab_size,
        chunks=chunks,
        lanes=lanes,
        block=block,
        infinity=INFINITY_BITS,
        chained=chained,
        launch_pdl=chained,
        num_warps=num_warps,
    )
    _race_kernel[(chunks, num_rows)](
        logits,
        temperature,
        seed,
        position,
        largest,
        edge,
        best,
        ids,
        logits.stride(0),
        vocab_size=vocab_size,
        block=block,
        chained=chained,
        launch_pdl=chained,
        num_warps=num_warps,
    )
    _finish_kernel[(num_rows,)](
        logits,
        forbidden,
        aside,
        edge,
        best,
        ids,
        tokens,
        *strides,
        vocab_size,
        width,
        few=few,
        restore=width > 0,
        chunks=chunks,
        lanes=lanes,
        chained=chained,
        launch_pdl=chained,
        num_warps=1,
    )
    return tokens


@triton.jit  # type: ignore[untyped-decorator]
def _forbid_kernel(  # type: ignore[no-untyped-def]
    logits, forbidden, aside, stride, forbidden_stride, vocab_size, width, block: tl.constexpr, chained: tl.constexpr
):
    await_predecessor(chained)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    token = tl.load(forbidden + row * forbidden_stride + lane, mask=lane < width, other=-1)
    there = (token >= 0) & (token < vocab_size)
    tl.store(aside + row * width + lane, tl.load(logits + row * stride + token, mask=there, other=0.0), mask=there)
    nothing = tl.full((block,), float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * stride + token, nothing, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _best_kernel(logits, best, ids, stride, vocab_size, block: tl.constexpr, chained: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logit of a chunk and its lowest id; NaN if there is one."""
    await_predecessor(chained)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = chunk * block + tl.arange(0, block)
    value = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    bad = tl.max((value != value).to(tl.int32), axis=0)
    largest = tl.max(value, axis=0)
    first = tl.min(tl.where(value == largest, token, 2147483647), axis=0)
    place = row * tl.num_programs(0) + chunk
    tl.store(best + place, tl.where(bad != 0, float("nan"), largest))
    tl.store(ids + place, first)


@triton.jit  # type: ignore[untyped-decorator]
def _distance(row, token, largest, temperature, vocab_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """How far logits lie below the largest, over the temperature: at least 0, infinite where there is none. Its bits order as it does."""
    value = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(largest - value, tl.zeros_like(value) + temperature)


@triton.jit  # type: ignore[untyped-decorator]
def _upto(  # type: ignore[no-untyped-def]
    row, largest, temperature, edge, first, second, third, vocab_size: tl.constexpr, block: tl.constexpr, with_mass: tl.constexpr
):
    """How many tokens lie within each of three distances (bits), and their mass, both only of those within `edge`."""
    lane = tl.arange(0, block)
    count_1 = tl.zeros((block,), tl.int32)
    count_2 = tl.zeros((block,), tl.int32)
    count_3 = tl.zeros((block,), tl.int32)
    mass_1 = tl.zeros((block,), tl.float64)
    mass_2 = tl.zeros((block,), tl.float64)
    mass_3 = tl.zeros((block,), tl.float64)
    for start in tl.range(0, vocab_size, block, num_stages=3):
        distance = _distance(row, start + lane, largest, temperature, vocab_size)
        bits = distance.to(tl.int32, bitcast=True)
        kept = (bits <= edge) & (start + lane < vocab_size)
        in_1 = kept & (bits <= first)
        in_2 = kept & (bits <= second)
        in_3 = kept & (bits <= third)
        count_1 += in_1.to(tl.int32)
        count_2 += in_2.to(tl.int32)
        count_3 += in_3.to(tl.int32)
        if with_mass:
            weight = tl.exp(-distance).to(tl.float64)
            mass_1 += tl.where(in_1, weight, 0.0)
            mass_2 += tl.where(in_2, weight, 0.0)
            mass_3 += tl.where(in_3, weight, 0.0)
    return (
        tl.sum(count_1, axis=0),
        tl.sum(count_2, axis=0),
        tl.sum(count_3, axis=0),
        tl.sum(mass_1, axis=0),
        tl.sum(mass_2, axis=0),
        tl.sum(mass_3, axis=0),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _edge(  # type: ignore[no-untyped-def]
    row, largest, temperature, edge, wanted_count, wanted_mass, vocab_size: tl.constexpr, block: tl.constexpr, by_mass: tl.constexpr
):
    """The least distance (bits) within which wanted_count tokens lie; by_mass: wanted_mass of mass, and wanted_count is -1.

    `edge` holds enough. Three marks a round quarter the bracket (low, high]: low holds too little, high enough. It ends early when nothing is
    left to tell apart.
    """
    low = edge * 0 - 1
    high = edge
    low_count = edge * 0
    high_count = low_count + 2147483647
    while (high - low > 1) & (high_count - low_count > 1) & (high_count != wanted_count):
        quarter = (high - low) // 4
        first = low + tl.maximum(quarter, 1)
        second = low + tl.maximum((high - low) // 2, 1)
        third = high - tl.maximum(quarter, 1)
        count_1, count_2, count_3, mass_1, mass_2, mass_3 = _upto(row, largest, temperature, edge, first, second, third, vocab_size, block, by_mass)
        if by_mass:
            enough_1 = mass_1 >= wanted_mass
            enough_2 = mass_2 >= wanted_mass
            enough_3 = mass_3 >= wanted_mass
        else:
            enough_1 = count_1 >= wanted_count
            enough_2 = count_2 >= wanted_count
            enough_3 = count_3 >= wanted_count
        high_count = tl.where(enough_1, count_1, tl.where(enough_2, count_2, tl.where(enough_3, count_3, high_count)))
        high = tl.where(enough_1, first, tl.where(enough_2, second, tl.where(enough_3, third, high)))
        low_count = tl.where(enough_1, low_count, tl.where(enough_2, count_1, tl.where(enough_3, count_2, count_3)))
        low = tl.where(enough_1, low, tl.where(enough_2, first, tl.where(enough_3, second, third)))
    return high


@triton.jit  # type: ignore[untyped-decorator]
def _edge_kernel(  # type: ignore[no-untyped-def]
    logits,
    best,
    ids,
    temperature,
    top_k,
    top_p,
    min_p,
    largest_of,
    edge_of,
    tokens,
    stride,
    vocab_size: tl.constexpr,
    chunks: tl.constexpr,
    lanes: tl.constexpr,
    block: tl.constexpr,
    infinity: tl.constexpr,
    chained: tl.constexpr,
):
    """The row's largest logit and the distance that its filters keep (bits); -1 where nothing is left to draw: its token is written here."""
    await_predecessor(chained)
    index = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)
    found = tl.load(best + index * chunks + lane, mask=lane < chunks, other=float("-inf"))
    bad = tl.max((found != found).to(tl.int32), axis=0)
    largest = tl.max(found, axis=0)
    first = tl.load(ids + index * chunks + lane, mask=lane < chunks, other=2147483647)
    token = tl.min(tl.where(found == largest, first, 2147483647), axis=0)
    finite = (bad == 0) & (largest > float("-inf")) & (largest < float("inf"))
    heat = tl.load(temperature + index)
    edge = tl.full((), -1, tl.int32)
    if finite & (heat > 0.0):
        row = logits + index * stride
        edge = tl.full((), infinity, tl.int32)
        kept = tl.load(top_k + index)
        if (kept > 0) & (kept < vocab_size):
            edge = _edge(row, largest, heat, edge, kept, 0.0, vocab_size, block, False)
        nucleus = tl.load(top_p + index)
        if nucleus < 1.0:
            _, _, _, mass, _, _ = _upto(row, largest, heat, edge, edge, edge, edge, vocab_size, block, True)
            edge = _edge(row, largest, heat, edge, -1, mass * nucleus.to(tl.float64), vocab_size, block, True)
        least = tl.load(min_p + index)
        if least > 0.0:
            edge = tl.minimum(edge, (-tl.log(least.to(tl.float64))).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(largest_of + index, largest)
    tl.store(edge_of + index, edge)
    tl.store(tokens + index, tl.where(finite, token, -1).to(tl.int64))


@triton.jit
def _arrivals(token, first, second):  # type: ignore[no-untyped-def]
    """Exponentially distributed float32 above 0; all int32. See `naive_arrivals`."""
    mixed = token * -1640531527 + first
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * -2048144789
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF) ^ second) * -1028477387
    mixed = mixed ^ ((mixed >> 16) & 0xFFFF)
    part = mixed.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    part = tl.minimum(tl.where(part < 0.0, part + 1.0, part), 0.99999994)
    # The logarithm of one minus a small number has lost digits that its series keeps.
    series = part * (1.0 + part * (0.5 + part * (0.33333334 + part * 0.25)))
    return tl.where(part < 0.015625, series, -tl.log(1.0 - part))


@triton.jit  # type: ignore[untyped-decorator]
def _race_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    seed,
    position,
    largest_of,
    edge_of,
    best,
    ids,
    stride,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
):
    """Who is first of a chunk: the largest of weight over arrival, and its lowest token."""
    await_predecessor(chained)
    chunk = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    edge = tl.load(edge_of + index)
    if edge >= 0:
        token = chunk * block + tl.arange(0, block)
        distance = _distance(logits + index * stride, token, tl.load(largest_of + index), tl.load(temperature + index), vocab_size)
        weight = tl.where(distance.to(tl.int32, bitcast=True) <= edge, tl.exp(-distance), 0.0)
        first, second = draw_key(tl.load(seed + index), tl.load(position + index))
        speed = tl.div_rn(weight, _arrivals(token, first, second))
        fastest = tl.max(speed, axis=0)
        place = index * tl.num_programs(0) + chunk
        tl.store(best + place, fastest)
        tl.store(ids + place, tl.min(tl.where(speed == fastest, token, 2147483647), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _finish_kernel(  # type: ignore[no-untyped-def]
    logits,
    forbidden,
    aside,
    edge_of,
    best,
    ids,
    tokens,
    stride,
    forbidden_stride,
    vocab_size,
    width,
    few: tl.constexpr,
    restore: tl.constexpr,
    chunks: tl.constexpr,
    lanes: tl.constexpr,
    chained: tl.constexpr,
):
    """Who is first of all chunks; and forbidden tokens get their logits back."""
    await_predecessor(chained)
    index = tl.program_id(0).to(tl.int64)
    if tl.load(edge_of + index) >= 0:
        lane = tl.arange(0, lanes)
        speed = tl.load(best + index * chunks + lane, mask=lane < chunks, other=-1.0)
        first = tl.load(ids + index * chunks + lane, mask=lane < chunks, other=2147483647)
        token = tl.min(tl.where(speed == tl.max(speed, axis=0), first, 2147483647), axis=0)
        tl.store(tokens + index, token.to(tl.int64))
    if restore:
        place = tl.arange(0, few)
        stop = tl.load(forbidden + index * forbidden_stride + place, mask=place < width, other=-1)
        there = (stop >= 0) & (stop < vocab_size)
        tl.store(logits + index * stride + stop, tl.load(aside + index * width + place, mask=there, other=0.0), mask=there)
