"""Calls in a stream of JSON text, taken apart as it comes. Pure.

    {"name": "f", "arguments": {"x": 1}}        one after the other, or in an array, with , or ; between them
    {"arguments": {"x": 1}, "name": "f"}        in any order; "parameters" is as good as "arguments"

Arguments go on to the client as they are written, once the function's name is known.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass

_BETWEEN = " \t\r\n[],;"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of the answer's call number `index`. The first one has `call_id` and `name`; arguments of all parts, joined, are a JSON text."""

    index: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class CallScanner:
    """`feed` gives parts of calls; `refused` is text that turned out to be no call of an offered function, and what came behind it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.num_calls = 0
        self.refused: str | None = None
        self._raw = ""  # of the object that is no call yet
        self._reset()

    @property
    def is_between(self) -> bool:
        """No object is open."""
        return self._depth == 0

    def feed(self, char: str) -> list[CallPart]:
        if self._depth == 0:
            return self._begin(char)
        self._raw += char
        part = self._value(char) if self._depth > 1 or self._in_value else self._top(char)
        if self._is_over:
            return part + self._end()
        return part

    def cut(self) -> list[CallPart]:
        """The text ends here. An object that is no call yet is text; arguments that are not whole stay as they are."""
        if self._depth and not self._named:
            self.refused = self._raw
        parts = self._told()
        self._reset()
        return parts

    # --- one object -----------------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._depth = 0
        self._raw = ""
        self._token = ""  # of the string that is being read at depth 1
        self._in_string = self._escaped = False
        self._key = ""
        self._in_value = False
        self._kept = ""  # of the value that is being read, what was not told yet
        self._arguments = ""
        self._is_text = False  # the arguments came as a JSON string
        self._name = ""
        self._named = self._is_headed = self._started = False
        self._index = -1
        self._has_arguments = False
        self._is_over = False

    def _begin(self, char: str) -> list[CallPart]:
        if char == "{":
            self._reset()
            self._depth, self._raw = 1, char
        elif char not in _BETWEEN:
            self.refused = char
        return []

    def _top(self, char: str) -> list[CallPart]:
        """Between keys and values."""
        if self._in_string:
            self._token += char
            if self._ends_string(char):
                self._key, self._token = _spelt(self._token), ""
        elif char == '"':
            self._in_string, self._token = True, char
        elif char == ":":
            self._in_value = True
            self._kept = ""
        elif char == "}":
            self._is_over = True
        return []

    def _value(self, char: str) -> list[CallPart]:
        if not self._in_string and self._depth == 1 and char in ",}":
            self._value_is_over()
            self._is_over = char == "}"
            return self._told()
        self._kept += char
        if self._in_string:
            self._ends_string(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return self._told()

    def _ends_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
        return not self._in_string

    def _value_is_over(self) -> None:
        value, self._in_value = self._kept, False
        if self._key == "name" and not self._named:
            self._kept = ""
            self._name = _spelt(value.strip())
            self._named = self._name in self._names
        elif self._key in _ARGUMENTS:
            self._arguments += value.rstrip()
            self._kept = ""
            self._has_arguments = True
        else:
            self._kept = ""

    def _told(self) -> list[CallPart]:
        """What can go out now: everything of the arguments but white space at the end, which may be the object's own."""
        if self._key in _ARGUMENTS and self._in_value:
            whole = self._kept.rstrip()
            self._arguments += whole
            self._kept = self._kept[len(whole) :]
        if not self._arguments or not self._named:
            return self._head()
        head = self._head()
        if not self._is_text and self._arguments.lstrip().startswith('"') and not self._started:
            self._is_text = True
        if self._is_text and not self._has_arguments:
            return head
        text = self._arguments if self._started else self._arguments.lstrip()
        text, self._arguments, self._started = _spelt(text) if self._is_text else text, "", True
        return [*head, CallPart(self._index, text)] if text else head

    def _head(self) -> list[CallPart]:
        if not self._named or self._is_headed:
            return []
        self._is_headed, self._index = True, self.num_calls
        self.num_calls += 1
        return [CallPart(self._index, call_id=new_call_id(), name=self._name)]

    def _end(self) -> list[CallPart]:
        if not self._named:
            self.refused = self._raw
            self._reset()
            return []
        parts = self._told()
        if not self._has_arguments:
            parts.append(CallPart(self._index, "{}"))
        self._reset()
        return parts


def _spelt(token: str) -> str:
    try:
        value = json.loads(token)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
