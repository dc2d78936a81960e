"""Typed reading of a config.json; a value of the wrong kind is an error that names the file, the field and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from baton.engine.errors import ModelConfigError

CONFIG_FILE = "config.json"


def read_config_json(folder: str | Path) -> tuple[dict[str, Any], Path]:
    """The object in `folder`/config.json, and the file. Raises ModelConfigError when there is none."""
    file = Path(folder) / CONFIG_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelConfigError(file, "file", None, "not found; a Hugging Face model folder holds config.json and *.safetensors") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelConfigError(file, "file", None, f"cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(file, "file", type(raw).__name__, "must be a JSON object")
    return raw, file


class Fields:
    """One JSON object of the file. A field that is absent and one that is null are alike, except to `raw`."""

    def __init__(self, raw: Mapping[str, Any], file: Path, prefix: str = "") -> None:
        self.raw = raw
        self._file = file
        self._prefix = prefix

    def fail(self, field: str, value: object, expected: str) -> NoReturn:
        raise ModelConfigError(self._file, self._prefix + field, value, expected)

    def count(self, field: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._value(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.fail(field, value, f"must be a whole number of at least {least}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._value(field, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            self.fail(field, value, "must be a number above 0")
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
