"""Draws tokens: many programs a row find its largest logit, then the filters' edge is found (sampling_edge), many run the race."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.chained import is_chained
from baton.kernels.device.chain import await_predecessor
from baton.kernels.device.philox import draw_key
from baton.kernels.device.sampling_edge import distances, launch_edge

#: Logits that a program looks at in one go.
BLOCK = 4096


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
    largest, edge = launch_edge(logits, best, ids, temperature, top_k, top_p, min_p, tokens, block)
    lanes = triton.next_power_of_2(chunks)
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
        distance = distances(logits + index * stride, token, tl.load(largest_of + index), tl.load(temperature + index), vocab_size)
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
