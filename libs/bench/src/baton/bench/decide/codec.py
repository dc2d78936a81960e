"""Frozen dataclasses from JSON, field by field, by their annotations."""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from baton.bench.errors import BenchFileError

T = TypeVar("T")


def decode(kind: type[T], value: Any, where: str) -> T:
    """A `kind` (a dataclass of numbers, texts, tuples, dicts and dataclasses) from what `json` read.

    Raises BenchFileError that names the place of a field that is missing, unknown or of another kind."""
    decoded: T = _decode(kind, value, where)
    return decoded


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return None if value is None else _decode(inner[0], value, where) if len(inner) == 1 else value
    if origin is tuple:
        _require(isinstance(value, list), where, "a list", value)
        return tuple(_decode(arguments[0], item, f"{where}[{place}]") for place, item in enumerate(value))
    if origin in (dict, Mapping):
        _require(isinstance(value, dict), where, "an object", value)
        return {name: _decode(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin is typing.Literal:
        _require(value in arguments, where, f"one of {', '.join(map(str, arguments))}", value)
        return value
    if kind is float:
        _require(isinstance(value, int | float) and not isinstance(value, bool), where, "a number", value)
        return float(value)
    _require(isinstance(value, kind), where, f"of type {kind.__name__}", value)
    return value


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), where, "an object", value)
    hints, known = typing.get_type_hints(kind), {field.name: field for field in fields(kind)}
    if unknown := sorted(set(value) - set(known)):
        raise BenchFileError(f"{where} has the unknown field {unknown[0]!r}; known are {', '.join(known)}")
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise BenchFileError(f"{where} lacks the field {name!r}")
    return kind(**{name: _decode(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _require(holds: bool, where: str, wanted: str, value: Any) -> None:
    if not holds:
        raise BenchFileError(f"{where} is {value!r}, but must be {wanted}")
