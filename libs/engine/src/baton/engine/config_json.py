"""Typed reading of a config.json; a value of the wrong kind is an error that names the file, the field and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from baton.engine.errors import ModelConfigError
from baton.engine.folder_file import why_unreadable

CONFIG_FILE = "config.json"

#: No count of a model reaches it; sizes made of such counts are still exact and quick to compute.
MOST_OF_ANYTHING = 1 << 31

#: Characters of a wrong value in a message.
_MOST_SHOWN = 300


def read_config_json(folder: str | Path) -> tuple[dict[str, Any], Path]:
    """The object in `folder`/config.json, and the file. Raises ModelConfigError when there is none."""
    file = Path(folder) / CONFIG_FILE
    why = why_unreadable(file)
    if why is not None:
        raise ModelConfigError(file, f"{why}; a Hugging Face model folder holds config.json and *.safetensors")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    # ValueError: not UTF-8, not JSON, or a number of more digits than Python reads. RecursionError: nested without end.
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(file, f"cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(file, "must be a JSON object")
    return raw, file


class Fields:
    """One JSON object of the file. A field that is absent and one that is null are alike, except to `raw`."""

    def __init__(self, raw: Mapping[str, Any], file: Path, prefix: str = "") -> None:
        self.raw = raw
        self._file = file
        self._prefix = prefix

    def fail(self, field: str, value: object, expected: str) -> NoReturn:
        shown = repr(value)
        if len(shown) > _MOST_SHOWN:
            shown = f"{shown[:_MOST_SHOWN]} ..."
        raise ModelConfigError(self._file, f"{self._prefix}{field} = {shown}: {expected}", self._prefix + field)

    def count(self, field: str, default: int | None = None, least: int = 1, most: int = MOST_OF_ANYTHING) -> int:
        """A whole number of at least `least` and at most `most`."""
        value = self._value(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.fail(field, value, f"must be a whole number of at least {least} and at most {most}")
        return value

    def number(self, field: str, default: float | None = None, least: float = 1e-6, most: float = 1e6) -> float:
        """A number of at least `least`, which is above 0, and at most `most`: never infinite, nor too small or large for float32."""
        value = self._value(field, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            self.fail(field, value, f"must be a number above 0, of at least {least:g} and at most {most:g}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self._value(field, default)
        if not isinstance(value, bool):
            self.fail(field, value, "must be true or false")
        return value

    def indexes(self, field: str, size: int) -> frozenset[int]:
        """A list of whole numbers in [0, size); empty when the field is not there."""
        value = self._value(field, [])
        if not isinstance(value, list) or not all(isinstance(index, int) and not isinstance(index, bool) and 0 <= index < size for index in value):
            self.fail(field, value, f"must be a list of whole numbers from 0 to {size - 1}")
        return frozenset(value)

    def inside(self, field: str) -> Fields:
        """The object in `field`; an empty one when the field is not there."""
        value = self._value(field, {})
        if not isinstance(value, dict):
            self.fail(field, value, "must be a JSON object")
        return Fields(cast("dict[str, Any]", value), self._file, f"{self._prefix}{field}.")

    def _value(self, field: str, default: object) -> object:
        value = self.raw.get(field)
        return default if value is None else value
