"""Random weights of the right shapes, for measuring a geometry whose files are not there."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from baton.engine.inventory import TensorSpec
from baton.engine.weights import Part, Progress

#: A prime: rows of a matrix never repeat, whatever its width.
_BLOCK_ELEMENTS = 1_048_583

#: Half the width of the uniform distribution: its standard deviation is 0.02, what these families are initialised with.
_SPREAD = 0.02 * math.sqrt(3)


class DummyReader:
    """The Reader of no files: norms are ones, all else is uniform with a standard deviation of 0.02.

    Every tensor is one block of random numbers laid end to end from a place that its name and `seed` pick: as fast as a copy, and the
    same on every device. No two rows of a matrix are equal; long-range repetition does not matter to what is measured.
    """

    def __init__(self, dtype: torch.dtype, seed: int = 0, progress: Progress | None = None) -> None:
        self._dtype = dtype
        self._seed = seed
        self._progress = progress
        self._num_bytes_made = 0
        self._num_bytes_wanted = 0
        block = torch.empty(_BLOCK_ELEMENTS, dtype=torch.float32).uniform_(-_SPREAD, _SPREAD, generator=torch.Generator().manual_seed(seed))
        self._block = block.to(dtype)
        self._blocks: dict[str, Tensor] = {}

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Nothing can be missing; the sum is what progress counts towards."""
        self._num_bytes_wanted = sum(spec.num_elements for spec in specs) * self._dtype.itemsize

    def read(self, name: str, shape: tuple[int, ...], device: torch.device | str | None = None, part: Part | None = None) -> Tensor:
        """As `Reader.read`. A part is cut from the whole tensor, so that every degree of tensor parallelism sees the same model."""
        place = "cpu" if device is None else str(device)
        tensor = torch.empty(shape, dtype=self._dtype, device=place)
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        else:
            self._fill(tensor.view(-1), zlib.crc32(f"{self._seed} {name}".encode()) % _BLOCK_ELEMENTS, place)
        if part is not None:
            tensor = tensor.narrow(part.axis, part.start, part.stop - part.start).clone(memory_format=torch.contiguous_format)
        if self._progress is not None:
            self._num_bytes_made += tensor.nbytes
            self._progress(self._num_bytes_made, max(self._num_bytes_wanted, self._num_bytes_made))
        return tensor

    def _fill(self, flat: Tensor, start: int, place: str) -> None:
        if place not in self._blocks:
            self._blocks[place] = self._block.to(place)
        block = self._blocks[place]
        head = min(_BLOCK_ELEMENTS - start, len(flat))
        flat[:head] = block[start : start + head]
        whole, rest = divmod(len(flat) - head, _BLOCK_ELEMENTS)
        flat[head : head + whole * _BLOCK_ELEMENTS].view(whole, _BLOCK_ELEMENTS).copy_(block)
        if rest:
            flat[-rest:] = block[:rest]
