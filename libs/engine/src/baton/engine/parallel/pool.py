"""The KV pool of a tensor-parallel engine: one part a rank, each with that rank's KV heads of every page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.engine.layout import KVLayout
from baton.engine.pool import KVPool


@dataclass(frozen=True, slots=True)
class ShardedPool:
    """layout: of all heads together; a page has the same number in every part."""

    layout: KVLayout
    parts: tuple[KVPool, ...]

    @classmethod
    def make(cls, layout: KVLayout, dtype: torch.dtype, devices: Sequence[torch.device]) -> ShardedPool:
        own = layout.of_rank(len(devices))
        return cls(layout, tuple(KVPool(own, dtype, device=device) for device in devices))

    @classmethod
    def over(cls, layout: KVLayout, dtype: torch.dtype, buffers: Sequence[memoryview]) -> ShardedPool:
        """In host memory that the caller owns: a buffer for each rank, as `KVPool` takes it, of `layout.of_rank(...).pool_bytes`."""
        own = layout.of_rank(len(buffers))
        return cls(layout, tuple(KVPool(own, dtype, buffer) for buffer in buffers))
