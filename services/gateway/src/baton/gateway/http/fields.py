"""Fields of a JSON body, by name and type. A wrong type is refused with field and value, never converted; an unknown field is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from baton.gateway.errors import MissingFieldError, UnsupportedError, WrongTypeError

T = TypeVar("T")

_SHOWN_CHARS = 60


class Fields:
    """Takes fields out of one object; `refuse_rest` then speaks about those that nobody took. null counts as not given."""

    def __init__(self, body: dict[str, Any], path: str = "") -> None:
        self._rest = dict(body)
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        return self._rest.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._rest.pop(name, None)

    def text(self, name: str) -> str | None:
        value: str | None = self._typed(name, "a string", lambda value: isinstance(value, str))
        return value

    def boolean(self, name: str) -> bool | None:
        value: bool | None = self._typed(name, "true or false", lambda value: isinstance(value, bool))
        return value

    def integer(self, name: str) -> int | None:
        value: int | None = self._typed(name, "an integer", is_integer)
        return value

    def number(self, name: str) -> float | None:
        value = self._typed(name, "a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
        try:
            return None if value is None else float(value)
        except OverflowError as error:
            raise WrongTypeError(self.path(name), f"{self.path(name)} must be a number of at most 64 bits") from error

    def array(self, name: str) -> list[Any] | None:
        value: list[Any] | None = self._typed(name, "an array", lambda value: isinstance(value, list))
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._typed(name, "an object", lambda value: isinstance(value, dict))
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._typed(name, "an array of integers", lambda value: isinstance(value, list) and all(is_integer(item) for item in value))
        return tuple(value or ())

    def required(self, name: str, value: T | None) -> T:
        if value is None:
            raise MissingFieldError(self.path(name), f"{self.path(name)} is missing")
        return value

    def only(self, name: str, allowed: Iterable[Any], remedy: str) -> None:
        """A feature of other servers: its idle values are taken, anything else is refused."""
        value = self.raw(name)
        if value is not None and not any(type(value) is type(idle) and value == idle for idle in allowed):
            raise UnsupportedError(self.path(name), f"{self.path(name)}={shown(value)} is not supported here: {remedy}")

    def refuse_rest(self) -> None:
        for name, value in self._rest.items():
            if value is not None:
                raise UnsupportedError(self.path(name), f"{self.path(name)} is not a field that this server knows: leave it out")

    def _typed(self, name: str, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = self.raw(name)
        if value is not None and not fits(value):
            raise WrongTypeError(self.path(name), f"{self.path(name)}={shown(value)} must be {expected}")
        return value


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value for a message: never a whole prompt."""
    if isinstance(value, str | list | dict) and len(text := json.dumps(value, ensure_ascii=True)) > _SHOWN_CHARS:
        kind = {str: "string", list: "array", dict: "object"}[type(value)]
        return f"({kind} of {len(text)} characters)"
    return json.dumps(value, ensure_ascii=True)
