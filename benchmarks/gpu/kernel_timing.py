"""Times on a GPU with a cold cache, random numbers, and the two rates that floors are made of."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from floor import measure_floor
from torch import Tensor

DRY = "--dry" in sys.argv
if DRY:
    # Triton looks at this when a kernel is defined, which its first launch does.
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cpu" if DRY else "cuda"
# The interpreter has no bfloat16.
DTYPE = torch.float16 if DRY else torch.bfloat16
#: Qwen3-8B.
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCABULARY = (4, 2, 32, 64, 96, 200) if DRY else (32, 8, 128, 4096, 12288, 151936)
#: Larger than any second-level cache, and slow enough to write that the next launch is queued before it is done.
FLUSH_BYTES = 512 << 20
#: Milliseconds of measuring, and rounds, at most.
BUDGET_MS, MAX_ROUNDS = 60.0, 40

_flush: list[Tensor] = []


def sized(real: int, tiny: int) -> int:
    return tiny if DRY else real


def random(*shape: int, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE, dtype=torch.float32) * scale).to(dtype)


def milliseconds(run: Callable[[], Any]) -> float:
    """Median of replays of a captured graph, each after the cache was flushed. Everything that is timed must therefore be capturable."""
    if DRY:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1000
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    if not _flush:
        _flush.append(torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE))
    first = _replay(graph, 3)
    return _replay(graph, max(5, min(MAX_ROUNDS, int(BUDGET_MS / first))))


def _replay(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in events:
        _flush[0].zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[rounds // 2]


class Paged:
    """Sequences of equal length in pages that are in no order."""

    def __init__(self, num_sequences: int, length: int, page_size: int) -> None:
        pages = -(-length // page_size)
        self.keys, self.values = (random(num_sequences * pages, page_size, KV_HEADS, HEAD_DIM) for _ in range(2))
        self.table = torch.randperm(num_sequences * pages, device=DEVICE).to(torch.int32).view(num_sequences, pages)
        self.lengths = torch.full((num_sequences,), length, dtype=torch.int32, device=DEVICE)
        self.num_bytes = 2.0 * num_sequences * length * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def measured_rates() -> tuple[float, float]:
    """Bytes a second of a copy (read and written), operations a second of a matrix product of random numbers. Not captured: a copy inside a
    graph was seen at two thirds of its rate outside."""
    if DRY:
        return 1e6, 1e6  # tiny shapes: nobody reads these ratios
    found = measure_floor(DEVICE)
    return found.copy_bytes_per_s, found.matrix_flops
