"""Which files of a folder hold its weights. Only names and sizes are read here, and no torch."""

from __future__ import annotations

import json
from pathlib import Path

from baton.engine.errors import WeightsError
from baton.engine.folder_file import why_unreadable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def read_index(folder: Path) -> dict[str, Path] | None:
    """The file of each tensor by the tensor's name, as the index has them; None: there is no index, all are in SINGLE_FILE.

    Raises WeightsError for an index that is there and is of no use.
    """
    index = folder / INDEX_FILE
    why = why_unreadable(index)
    if why == "not found":
        return None
    if why is not None:
        raise WeightsError(index, why)
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    # ValueError: not UTF-8, not JSON, or a number of more digits than Python reads. RecursionError: nested without end.
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise WeightsError(index, f"cannot be read as an index with a weight_map: {error!r}") from error
    if not isinstance(places, dict):
        raise WeightsError(index, f"weight_map is a {type(places).__name__}; must be an object from tensors to files")
    for name, file in places.items():
        if not isinstance(file, str) or not file or "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise WeightsError(index, f"weight_map places tensor {name} in {file!r}; must be the name of a file in this folder")
    return {name: folder / file for name, file in places.items()}


def weight_files(folder: Path) -> list[Path]:
    """The files that the weights are read from, in order of their names. Raises WeightsError for one that is not there or cannot be read."""
    places = read_index(folder)
    if places is None:
        require_weights(folder / SINGLE_FILE)
        return [folder / SINGLE_FILE]
    first_of = {file: name for name, file in reversed(places.items())}
    for file in sorted(first_of):
        require_weights(file, first_of[file])
    return sorted(first_of)


def require_weights(file: Path, placed: str | None = None) -> None:
    """Raises WeightsError unless `file` can be read. placed: a tensor that the index places there; None: there is no index."""
    why = why_unreadable(file)
    if why is None:
        return
    if placed is not None:
        why += f"; {INDEX_FILE} places tensor {placed} there"
    elif why == "not found" and file.name == SINGLE_FILE:
        why += f", nor is {INDEX_FILE}; weights must be safetensors"
    raise WeightsError(file, why)
