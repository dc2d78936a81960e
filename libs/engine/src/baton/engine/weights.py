"""Tensors of a Hugging Face folder, read one by one and checked against the shape that the model expects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.errors import WeightsError
from baton.engine.inventory import TensorSpec
from baton.engine.weight_files import INDEX_FILE, SINGLE_FILE, read_index, weight_files

#: Names under it are a layer's; each must be one that the model reads.
_LAYERS = "model.layers."

#: What old folders keep beside a layer's weights although it follows from config.json.
_DERIVED = ".rotary_emb.inv_freq"

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_ROWS_COMPARED = 4096

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
        """`specs`: all that the model will read. Raises WeightsError for the first tensor that is missing, misshapen or of a wrong type, or that
        belongs to a layer although the model has no use for it."""

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
        weight_files(self._folder)  # all of them are there, and none is a pipe
        places = read_index(self._folder)
        #: Where the list of all tensors is: what a missing one is missing from.
        self._list = self._folder / (SINGLE_FILE if places is None else INDEX_FILE)
        self._files = dict.fromkeys(self._open(self._list, "cpu").keys(), self._list) if places is None else places

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()

    def check(self, specs: Iterable[TensorSpec]) -> None:
        self._num_bytes_wanted = 0
        wanted = set()
        for spec in specs:
            self._num_bytes_wanted += _stored_bytes(self._header(spec.name, spec.shape, "cpu"))
            wanted.add(spec.name)
        for name, file in self._files.items():
            if name.startswith(_LAYERS) and not name.endswith(_DERIVED) and name not in wanted:
                raise WeightsError(
                    file, f"tensor {name} has no place in the model that config.json describes; with it left out answers would be wrong"
                )
        if _HEAD in self._files and _HEAD not in wanted and not self._head_is_embedding():
            why = f"tensor {_HEAD} differs from {_EMBEDDING}, but config.json has tie_word_embeddings true: it is not used"
            logging.getLogger(__name__).warning("%s: %s", self._files[_HEAD], why)

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
            raise WeightsError(self._list, f"tensor {name} is missing; expected shape {list(shape)}")
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

    def _head_is_embedding(self) -> bool:
        """Whether the two are equal in every number; read in blocks of rows."""
        try:
            head, embedding = (self._open(self._files[name], "cpu").get_slice(name) for name in (_HEAD, _EMBEDDING))
        except SafetensorError as error:
            raise WeightsError(self._files[_HEAD], f"tensor {_HEAD} is missing although {INDEX_FILE} places it here") from error
        if head.get_shape() != embedding.get_shape() or head.get_dtype() != embedding.get_dtype():
            return False
        blocks = (slice(row, row + _ROWS_COMPARED) for row in range(0, head.get_shape()[0], _ROWS_COMPARED))
        return all(torch.equal(head[block], embedding[block]) for block in blocks)


def _stored_bytes(header: Any) -> int:
    count = 1
    for size in header.get_shape():
        count *= size
    return count * _ITEMSIZES[header.get_dtype()]
