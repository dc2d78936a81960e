"""Tensors of a Hugging Face folder, read one by one and checked against the shape that the model expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.errors import WeightsError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class WeightReader:
    """Knows which file holds which tensor; files are mapped, so that only what is read takes memory. Use as a context manager."""

    def __init__(self, folder: str | Path, dtype: torch.dtype) -> None:
        self._folder = Path(folder)
        self._dtype = dtype
        self._handles: dict[Path, Any] = {}
        self._index = self._folder / INDEX_FILE
        self._files = self._read_index() if self._index.exists() else self._read_single()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the model's dtype. Raises WeightsError with the file, the tensor and the expected shape."""
        file = self._files.get(name)
        if file is None:
            where = self._index if self._index.exists() else self._folder / SINGLE_FILE
            raise WeightsError(where, f"tensor {name} is missing; expected shape {list(shape)}")
        handle = self._open(file)
        try:
            found = tuple(handle.get_slice(name).get_shape())
        except SafetensorError as error:
            raise WeightsError(file, f"tensor {name} is missing although {INDEX_FILE} places it here; expected shape {list(shape)}") from error
        if found != shape:
            raise WeightsError(file, f"tensor {name} has shape {list(found)}; config.json makes it {list(shape)}")
        tensor: Tensor = handle.get_tensor(name)
        if not tensor.is_floating_point():
            raise WeightsError(file, f"tensor {name} has dtype {tensor.dtype}; expected float32, float16 or bfloat16")
        # A copy also where the dtype is right: the file's mapping must not stay under a running server.
        return tensor.to(self._dtype, copy=True)

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightsError(file, f"cannot be read as safetensors: {error}") from error
        return self._handles[file]

    def _read_single(self) -> dict[str, Path]:
        file = self._folder / SINGLE_FILE
        if not file.exists():
            raise WeightsError(file, f"not found, nor is {INDEX_FILE}; weights must be safetensors")
        return dict.fromkeys(self._open(file).keys(), file)

    def _read_index(self) -> dict[str, Path]:
        try:
            places = json.loads(self._index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): self._folder / str(file) for name, file in places.items()}
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(self._index, f"cannot be read as an index with a weight_map: {error!r}") from error
