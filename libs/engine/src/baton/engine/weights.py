"""Tensors of a Hugging Face folder, read one by one and checked against the shape that the model expects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.errors import WeightsError
from baton.engine.inventory import TensorSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
#: Bytes of one number by safetensors' name; these are also the types that are read.
_ITEMSIZES = {"F32": 4, "F16": 2, "BF16": 2}

#: Gets (bytes read, bytes of all tensors that the model reads), on the thread that reads, after each tensor.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """Of a tensor only [start, stop) along `axis`."""

    axis: int
    start: int
    stop: int


class Reader(Protocol):
    """Where a model's tensors come from."""

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raises WeightsError for the first tensor that is missing, misshapen or of a wrong type; reads headers only."""

    def read(self, name: str, shape: tuple[int, ...], device: torch.device | str | None = None, part: Part | None = None) -> Tensor:
        """The tensor, or `part` of it, in the model's dtype and contiguous on `device` (None: the CPU), owned by the caller.

        shape: of the whole tensor, as config.json makes it. Raises WeightsError with the file, the tensor and the expected shape.
        """


class WeightReader:
    """The Reader of safetensors files: knows which file holds which tensor; files are mapped, so that only what is read takes memory.

    Use as a context manager. progress: told after each tensor; its total is known once `check` has seen what will be read.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, progress: Progress | None = None) -> None:
        self._folder = Path(folder)
        self._dtype = dtype
        self._progress = progress
        self._num_bytes_read = 0
        self._num_bytes_wanted = 0
        self._handles: dict[tuple[Path, str], Any] = {}
        self._index = self._folder / INDEX_FILE
        self._files = self._read_index() if self._index.exists() else self._read_single()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()

    def check(self, specs: Iterable[TensorSpec]) -> None:
        self._num_bytes_wanted = sum(_stored_bytes(self._header(spec.name, spec.shape, "cpu")) for spec in specs)

    def read(self, name: str, shape: tuple[int, ...], device: torch.device | str | None = None, part: Part | None = None) -> Tensor:
        place = "cpu" if device is None else str(device)
        header = self._header(name, shape, place)
        if part is None:
            tensor: Tensor = self._handles[self._files[name], place].get_tensor(name)
        else:
            tensor = header[(slice(None),) * part.axis + (slice(part.start, part.stop),)]
        if self._progress is not None:
            self._num_bytes_read += tensor.nbytes
            self._progress(self._num_bytes_read, max(self._num_bytes_wanted, self._num_bytes_read))
        # On the CPU a copy also where the dtype is right: the file's mapping must not stay under a running server.
        return tensor.to(self._dtype, copy=tensor.device.type == "cpu").contiguous()

    def _header(self, name: str, shape: tuple[int, ...], place: str) -> Any:
        """safetensors' slice of the whole tensor, its shape and type checked."""
        file = self._files.get(name)
        if file is None:
            where = self._index if self._index.exists() else self._folder / SINGLE_FILE
            raise WeightsError(where, f"tensor {name} is missing; expected shape {list(shape)}")
        handle = self._open(file, place)
        try:
            header = handle.get_slice(name)
        except SafetensorError as error:
            raise WeightsError(file, f"tensor {name} is missing although {INDEX_FILE} places it here; expected shape {list(shape)}") from error
        found = tuple(header.get_shape())
        if found != shape:
            raise WeightsError(file, f"tensor {name} has shape {list(found)}; config.json makes it {list(shape)}")
        if header.get_dtype() not in _ITEMSIZES:
            raise WeightsError(file, f"tensor {name} has type {header.get_dtype()}; expected one of {', '.join(_ITEMSIZES)}")
        return header

    def _open(self, file: Path, place: str) -> Any:
        key = (file, place)
        if key not in self._handles:
            try:
                self._handles[key] = safe_open(file, framework="pt", device=place)
            except (OSError, SafetensorError) as error:
                raise WeightsError(file, f"cannot be read as safetensors: {error}") from error
        return self._handles[key]

    def _read_single(self) -> dict[str, Path]:
        file = self._folder / SINGLE_FILE
        if not file.exists():
            raise WeightsError(file, f"not found, nor is {INDEX_FILE}; weights must be safetensors")
        return dict.fromkeys(self._open(file, "cpu").keys(), file)

    def _read_index(self) -> dict[str, Path]:
        try:
            places = json.loads(self._index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): self._folder / str(file) for name, file in places.items()}
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(self._index, f"cannot be read as an index with a weight_map: {error!r}") from error


def _stored_bytes(header: Any) -> int:
    count = 1
    for size in header.get_shape():
        count *= size
    return count * _ITEMSIZES[header.get_dtype()]
