"""How far below a row's largest logit its filters let a token be drawn. No sort: many programs a row count what lies within some marks, and gather
the tokens within the least mark that holds enough; among those, mostly few, one program finds the edge by quartering float bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import await_predecessor

#: The bits of infinity: every distance from the largest logit is at most this.
INFINITY_BITS = tl.constexpr(0x7F800000)
#: Marks: distances of 0.25, 0.375, 0.5, 0.75, 1, 1.5 up to 32, as bits, and infinity.
NUM_MARKS = tl.constexpr(16)
FIRST_MARK_BITS = tl.constexpr(0x3E800000)
MARK_STEP_BITS = tl.constexpr(0x00400000)
#: Programs of a launch that counts or gathers, about: more of them take longer to find out that there is nothing to do.
NUM_PROGRAMS = 4 * 132
#: Gathered tokens that the one program looks at in one go.
EDGE_BLOCK = 2048


def launch_edge(
    logits: Tensor, best: Tensor, ids: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, tokens: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Each row's largest logit, [n] float32, and how far below it a token may be drawn, over the temperature: bits of float32, [n] int32, -1 where
    `tokens` [n] int64, which this writes, has the row's token already: the largest, or -1 of a row that has no finite one.

    best [n, chunks] float32, ids [n, chunks] int32: the largest logit of each `block` tokens and its lowest id.
    """
    num_rows, vocab_size = logits.shape
    chunks, device, chained = best.shape[1], logits.device, is_chained()
    largest = torch.empty(num_rows, dtype=torch.float32, device=device)
    edge = torch.empty(num_rows, dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, chunks, NUM_MARKS.value, dtype=torch.int32, device=device)
    masses = torch.empty(num_rows, chunks, NUM_MARKS.value, dtype=torch.float64, device=device)
    near = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
    sizes = {"vocab_size": vocab_size, "chunks": chunks, "lanes": triton.next_power_of_2(chunks)}
    row = (logits, best, temperature, top_k, top_p)
    launch = {"chained": chained, "launch_pdl": chained}
    num_warps = max(1, min(16, block // 256))
    grid = (max(1, min(chunks, NUM_PROGRAMS // max(1, num_rows))), num_rows)
    _count_kernel[grid](*row, counts, masses, logits.stride(0), **sizes, block=block, **launch, num_warps=num_warps)
    _gather_kernel[grid](*row, counts, masses, near, logits.stride(0), **sizes, block=block, **launch, num_warps=num_warps)
    few = min(EDGE_BLOCK, triton.next_power_of_2(vocab_size))
    _edge_kernel[(num_rows,)](
        best, ids, *row[2:], min_p, counts, masses, near, largest, edge, tokens, **sizes, block=few, **launch, num_warps=max(1, min(8, few // 256))
    )
    return largest, edge


@triton.jit  # type: ignore[untyped-decorator]
def distances(row, token, largest, temperature, vocab_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """How far logits lie below the largest, over the temperature: at least 0, infinite where there is none. Its bits order as it does."""
    value = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(largest - value, tl.zeros_like(value) + temperature)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(best, index, chunks: tl.constexpr, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's largest logit, and whether it is finite and none is NaN."""
    lane = tl.arange(0, lanes)
    found = tl.load(best + index * chunks + lane, mask=lane < chunks, other=float("-inf"))
    bad = tl.max((found != found).to(tl.int32), axis=0)
    largest = tl.max(found, axis=0)
    return largest, (bad == 0) & (largest > float("-inf")) & (largest < float("inf"))


@triton.jit
def _mark(number):  # type: ignore[no-untyped-def]
    """The bits of a mark's distance."""
    return tl.where(number >= NUM_MARKS - 1, INFINITY_BITS, FIRST_MARK_BITS + number * MARK_STEP_BITS)


@triton.jit  # type: ignore[untyped-decorator]
def _count_kernel(  # type: ignore[no-untyped-def]
    logits,
    best,
    temperature,
    top_k,
    top_p,
    counts,
    masses,
    stride,
    vocab_size: tl.constexpr,
    chunks: tl.constexpr,
    lanes: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
):
    """Of each chunk, within each mark: how many tokens, and their mass."""
    await_predecessor(chained)
    index = tl.program_id(1).to(tl.int64)
    heat, kept, nucleus = tl.load(temperature + index), tl.load(top_k + index), tl.load(top_p + index)
    by_count = (kept > 0) & (kept < vocab_size)
    if (heat > 0.0) & (by_count | (nucleus < 1.0)):
        largest, finite = _largest(best, index, chunks, lanes)
        if finite:
            for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
                token = chunk * block + tl.arange(0, block)
                distance = distances(logits + index * stride, token, largest, heat, vocab_size)
                bits = tl.where(token < vocab_size, distance.to(tl.int32, bitcast=True), 2147483647)
                weight = tl.exp(-distance).to(tl.float64)
                place = (index * chunks + chunk) * NUM_MARKS
                for number in tl.static_range(NUM_MARKS):
                    within = bits <= _mark(number)
                    tl.store(counts + place + number, tl.sum(within.to(tl.int32), axis=0))
                    if by_count == 0:
                        tl.store(masses + place + number, tl.sum(tl.where(within, weight, 0.0), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _enough(  # type: ignore[no-untyped-def]
    counts, masses, index, kept, nucleus, by_count, chunks: tl.constexpr, lanes: tl.constexpr
):
    """Of a row's marks: the first that holds what its filter keeps, how many tokens that holds, how many the one before, the mass of all."""
    lane = tl.arange(0, lanes)[:, None]
    number = tl.arange(0, NUM_MARKS)
    place = (index * chunks + lane) * NUM_MARKS + number[None, :]
    total = tl.sum(tl.load(counts + place, mask=lane < chunks, other=0), axis=0)
    mass = tl.zeros((NUM_MARKS,), tl.float64)
    everything = tl.full((), 0.0, tl.float64)
    if by_count:
        enough = total >= kept
    else:
        mass = tl.sum(tl.load(masses + place, mask=lane < chunks, other=0.0), axis=0)
        everything = tl.max(mass, axis=0)
        enough = mass >= everything * nucleus.to(tl.float64)
    chosen = tl.min(tl.where(enough, number, NUM_MARKS - 1), axis=0)
    held = tl.sum(tl.where(number == chosen, total, 0), axis=0)
    before = tl.sum(tl.where(number == chosen - 1, total, 0), axis=0)
    return chosen, held, before, everything


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    logits,
    best,
    temperature,
    top_k,
    top_p,
    counts,
    masses,
    near,
    stride,
    vocab_size: tl.constexpr,
    chunks: tl.constexpr,
    lanes: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
):
    """The distances (bits) of each chunk's tokens within the row's mark, to their places in `near`: in the order of tokens, whoever comes first."""
    await_predecessor(chained)
    index = tl.program_id(1).to(tl.int64)
    heat, kept, nucleus = tl.load(temperature + index), tl.load(top_k + index), tl.load(top_p + index)
    by_count = (kept > 0) & (kept < vocab_size)
    if (heat > 0.0) & (by_count | (nucleus < 1.0)):
        largest, finite = _largest(best, index, chunks, lanes)
        if finite:
            chosen, _, _, _ = _enough(counts, masses, index, kept, nucleus, by_count, chunks, lanes)
            lane = tl.arange(0, lanes)
            held = tl.load(counts + (index * chunks + lane) * NUM_MARKS + chosen, mask=lane < chunks, other=0)
            for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
                token = chunk * block + tl.arange(0, block)
                bits = distances(logits + index * stride, token, largest, heat, vocab_size).to(tl.int32, bitcast=True)
                within = (token < vocab_size) & (bits <= _mark(chosen))
                place = tl.sum(tl.where(lane < chunk, held, 0), axis=0) + tl.cumsum(within.to(tl.int32), axis=0) - 1
                tl.store(near + index * vocab_size + place, bits, mask=within)


@triton.jit  # type: ignore[untyped-decorator]
def _upto(  # type: ignore[no-untyped-def]
    near, num_near, edge, first, second, third, block: tl.constexpr, with_mass: tl.constexpr
):
    """How many tokens lie within each of three distances (bits), and their mass, both only of those within `edge`."""
    lane = tl.arange(0, block)
    count_1 = tl.zeros((block,), tl.int32)
    count_2 = tl.zeros((block,), tl.int32)
    count_3 = tl.zeros((block,), tl.int32)
    mass_1 = tl.zeros((block,), tl.float64)
    mass_2 = tl.zeros((block,), tl.float64)
    mass_3 = tl.zeros((block,), tl.float64)
    for start in tl.range(0, num_near, block):
        bits = tl.load(near + start + lane, mask=start + lane < num_near, other=2147483647)
        kept = bits <= edge
        in_1 = kept & (bits <= first)
        in_2 = kept & (bits <= second)
        in_3 = kept & (bits <= third)
        count_1 += in_1.to(tl.int32)
        count_2 += in_2.to(tl.int32)
        count_3 += in_3.to(tl.int32)
        if with_mass:
            weight = tl.exp(-bits.to(tl.float32, bitcast=True)).to(tl.float64)
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
    near, num_near, low, low_count, high, wanted_count, wanted_mass, block: tl.constexpr, by_mass: tl.constexpr
):
    """The least distance (bits) within which wanted_count tokens lie; by_mass: wanted_mass of mass, and wanted_count is -1.

    Three marks a round quarter the bracket (low, high]: low holds too little, high enough. It ends early when nothing is left to tell apart.
    """
    edge = high
    high_count = low_count * 0 + 2147483647
    while (high - low > 1) & (high_count - low_count > 1) & (high_count != wanted_count):
        quarter = (high - low) // 4
        first = low + tl.maximum(quarter, 1)
        second = low + tl.maximum((high - low) // 2, 1)
        third = high - tl.maximum(quarter, 1)
        count_1, count_2, count_3, mass_1, mass_2, mass_3 = _upto(near, num_near, edge, first, second, third, block, by_mass)
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
    best,
    ids,
    temperature,
    top_k,
    top_p,
    min_p,
    counts,
    masses,
    near,
    largest_of,
    edge_of,
    tokens,
    vocab_size: tl.constexpr,
    chunks: tl.constexpr,
    lanes: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
):
    await_predecessor(chained)
    index = tl.program_id(0).to(tl.int64)
    largest, finite = _largest(best, index, chunks, lanes)
    lane = tl.arange(0, lanes)
    found = tl.load(best + index * chunks + lane, mask=lane < chunks, other=float("-inf"))
    first = tl.load(ids + index * chunks + lane, mask=lane < chunks, other=2147483647)
    token = tl.min(tl.where(found == largest, first, 2147483647), axis=0)
    heat = tl.load(temperature + index)
    edge = tl.full((), -1, tl.int32)
    if finite & (heat > 0.0):
        edge = tl.full((), INFINITY_BITS, tl.int32)
        kept, nucleus = tl.load(top_k + index), tl.load(top_p + index)
        by_count = (kept > 0) & (kept < vocab_size)
        if by_count | (nucleus < 1.0):
            chosen, held, before, mass = _enough(counts, masses, index, kept, nucleus, by_count, chunks, lanes)
            row = near + index * vocab_size
            low = tl.where(chosen > 0, _mark(chosen - 1), -1)
            edge = _mark(chosen)
            if by_count:
                edge = _edge(row, held, low, before, edge, kept, 0.0, block, False)
                low, before = low * 0 - 1, before * 0
                if nucleus < 1.0:
                    _, _, _, mass, _, _ = _upto(row, held, edge, edge, edge, edge, block, True)
            if nucleus < 1.0:
                edge = _edge(row, held, low, before, edge, -1, mass * nucleus.to(tl.float64), block, True)
        least = tl.load(min_p + index)
        if least > 0.0:
            # Not the negated logarithm: of a min_p of 1 that is -0.0, whose bits are those of no distance.
            edge = tl.minimum(edge, tl.abs(tl.log(least.to(tl.float64))).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(largest_of + index, largest)
    tl.store(edge_of + index, edge)
    tl.store(tokens + index, tl.where(finite, token, -1).to(tl.int64))
