"""What the device can do at all, measured in the same run as what is held against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

GIGA = 1e9
#: Larger than the L2, so that a measurement finds none of its data there.
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Floor:
    """copy_bytes_per_s: read and written bytes of a large copy. matrix_flops: of a large bf16 product of random numbers."""

    copy_bytes_per_s: float
    matrix_flops: float


def measure_floor(device: str = "cuda:0") -> Floor:
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), 10)
    side = 8192
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    product_s = median_s(lambda: left @ right, 10)
    return Floor(2 * source.nbytes / copy_s, 2 * side**3 / product_s)


def median_s(launch: Callable[[], object], num_rounds: int, flush: torch.Tensor | None = None) -> float:
    """Seconds of device time of one call, the median of `num_rounds` after two warm ones."""
    spans = []
    for turn in range(num_rounds + 2):
        if flush is not None:
            flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
        if turn >= 2:
            spans.append(start.elapsed_time(end) / 1e3)
    return sorted(spans)[len(spans) // 2]
