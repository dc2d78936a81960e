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
    product = MatrixProduct(device)
    return Floor(2 * source.nbytes / copy_s, product.flops / median_s(product.launch, 10))


class MatrixProduct:
    """A large bf16 product of random numbers; `flops` operations a launch."""

    SIDE = 8192

    def __init__(self, device: str) -> None:
        self._left, self._right = (torch.randn(self.SIDE, self.SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.flops = 2 * self.SIDE**3

    def launch(self) -> None:
        torch.matmul(self._left, self._right)

    def flops_over(self, flops: float) -> float:
        """Operations a second of as many launches as `flops` operations need, without a pause."""
        count = max(1, round(flops / self.flops))

        def launch_all() -> None:
            for _ in range(count):
                self.launch()

        return count * self.flops / median_s(launch_all, 1, num_warm=0)


def median_s(launch: Callable[[], object], num_rounds: int, flush: torch.Tensor | None = None, num_warm: int = 2) -> float:
    """Seconds of device time of one call, the median of `num_rounds` after `num_warm`."""
    spans = []
    for turn in range(num_rounds + num_warm):
        if flush is not None:
            flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
        if turn >= num_warm:
            spans.append(start.elapsed_time(end) / 1e3)
    return sorted(spans)[len(spans) // 2]
