"""Tries tilings of the kernels that have some; one JSON line a shape, the best first."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from kernel_timing import DRY, DTYPE, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, VOCABULARY, Paged, milliseconds, random, sized

from baton.kernels.device.decode import DecodeTiling, launch_decode
from baton.kernels.device.linear import LinearTiling, launch_linear_few
from baton.kernels.device.prefill import PrefillTiling, launch_prefill

BEST = 5


def sweep(only: str, copy: float, product: float, rows: tuple[int, ...]) -> None:
    """copy: bytes a second; product: operations a second: of the floors. rows: of the products of few rows."""
    of_rows = partial(sweep_linear, of_rows=rows)
    for name, sweep_one in (("decode_attention", sweep_decode), ("prefill_attention", sweep_prefill), ("linear_few", of_rows)):
        if only in name:
            sweep_one(name, copy, product)


def sweep_decode(name: str, copy: float, _product: float) -> None:
    for batch, length, page_size in ((32, 8192, 16), (32, 8192, 64), (64, 2048, 64), (16, 2048, 64), (1, 2048, 64)):
        batch, length = sized(batch, 2), sized(length, 200)
        paged, query = Paged(batch, length, page_size), random(batch, HEADS, HEAD_DIM)
        arguments = (query, paged.keys, paged.values, paged.table, paged.lengths, HEAD_DIM**-0.5, 0)
        splits = (None, 1, 2, 3, 4, 6, 8) if batch > 1 else (None, 8, 16)
        runs: dict[str, Callable[[], Any]] = {}
        for block, warps, stages in ((64, 4, 3), (64, 4, 4), (64, 2, 3), (64, 8, 4), (128, 4, 2), (128, 8, 3), (32, 2, 4), (32, 4, 5)):
            tiling = DecodeTiling(block, warps, stages)
            for share in splits if (block, stages) in ((64, 3), (128, 2)) else splits[:1]:
                runs[f"{tiling} num_splits={share}"] = lambda tiling=tiling, share=share, arguments=arguments: launch_decode(
                    *arguments, share, None, None, tiling
                )
        _print(name, f"{batch} x {length}, pages of {page_size}", runs, paged.num_bytes / copy)


def sweep_prefill(name: str, _copy: float, product: float) -> None:
    import torch

    length = sized(8192, 40)
    for page_size in (64,):
        paged, query = Paged(1, length, page_size), random(length, HEADS, HEAD_DIM)
        starts = torch.tensor([0, length], dtype=torch.int32, device=query.device)
        arguments = (query, paged.keys, paged.values, paged.table, starts, paged.lengths, length, HEAD_DIM**-0.5, 0, None)
        runs: dict[str, Callable[[], Any]] = {}
        for rows, block, warps, stages in ((128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2)):
            tiling = PrefillTiling(rows, block, warps, stages)
            runs[str(tiling)] = lambda tiling=tiling, arguments=arguments: launch_prefill(*arguments, tiling)
        _print(name, f"{length}, pages of {page_size}", runs, 2.0 * HEADS * HEAD_DIM * length * (length + 1) / product)


def sweep_linear(name: str, copy: float, _product: float, of_rows: tuple[int, ...]) -> None:
    shapes = (
        ("qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, False),
        ("o", HIDDEN, HEADS * HEAD_DIM, False),
        ("gate_up + gate", 2 * MLP, HIDDEN, True),
        ("down", HIDDEN, MLP, False),
        ("lm_head", VOCABULARY, HIDDEN, False),
    )
    for title, width, depth, gated in shapes:
        weight = random(width, depth, scale=depth**-0.5)
        for rows in of_rows:
            x = random(rows, depth)
            runs: dict[str, Callable[[], Any]] = {}
            for columns, step, splits, warps, stages in _linear_tilings(width, rows):
                tiling = LinearTiling(columns, step, splits, warps, stages)
                runs[str(tiling)] = lambda tiling=tiling, x=x, weight=weight, gated=gated: launch_linear_few(
                    x, weight, None, None, gated, None, tiling
                )
            _print(name, f"{title}, {rows} x {depth} -> {width}", runs, weight.numel() * DTYPE.itemsize / copy)


def _linear_tilings(width: int, rows: int) -> list[tuple[int, int, int, int, int]]:
    if rows > 16:
        many = [
            (32, 128, 1, 4, 4),
            (64, 128, 1, 4, 4),
            (128, 64, 1, 8, 5),
            (32, 64, 1, 4, 4),
            (32, 64, 1, 4, 6),
            (64, 64, 1, 4, 4),
            (64, 64, 1, 8, 4),
        ]
        shared = [(64, 128, 2, 4, 4), (128, 64, 2, 4, 5), (128, 64, 4, 8, 5), (64, 64, 2, 4, 4), (64, 64, 4, 4, 4)]
        return (many if width > 65536 else many + shared)[: 2 if DRY else None]
    narrow = [(16, 256, 1, 4, 5), (16, 512, 1, 4, 4), (32, 256, 1, 4, 5), (32, 128, 2, 4, 5), (16, 256, 2, 2, 4)]
    wide = [(32, 256, 1, 4, 4), (64, 128, 1, 4, 4), (32, 128, 1, 4, 5), (64, 128, 1, 8, 4), (128, 64, 1, 4, 5)]
    return (narrow if width <= 8192 else wide)[: 2 if DRY else None]


def _print(name: str, shape: str, runs: dict[str, Callable[[], Any]], floor_s: float) -> None:
    found: list[tuple[float, str]] = []
    refused: dict[str, str] = {}
    for title, run in list(runs.items())[: 3 if DRY else None]:
        try:
            found.append((milliseconds(run), title))
        except Exception as refusal:  # A tiling may want more shared memory than there is; Triton's errors have no common parent.
            refused[title] = str(refusal).splitlines()[0][:80]
    best = [{"tiling": title, "ms": round(ms, 4), "ratio": round(floor_s * 1000 / ms, 3)} for ms, title in sorted(found)[:BEST]]
    print(json.dumps({"sweep": name, "shape": shape, "best": best, "refused": refused}), flush=True)
