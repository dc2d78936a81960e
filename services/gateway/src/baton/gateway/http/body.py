"""Reading a request's body: bounded, UTF-8, JSON, an object. Each thing that can be wrong has its own error."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from baton.gateway.body_limits import BodyLimits
from baton.gateway.errors import (
    BodyEncodingError,
    BodyTimeoutError,
    BodyTooLargeError,
    MalformedBodyError,
    SurrogateError,
    TooManyValuesError,
)

T = TypeVar("T")

#: Longer bodies are taken apart on a thread: it is a few milliseconds of work for the worst of them.
_MAX_INLINE_BYTES = 32 * 1024

#: The escape of half a UTF-16 pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, limits: BodyLimits, limit_s: float, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse`, which must be pure, makes of the body. Raises what `read_json_object` and `parse` do."""
    raw = await _read_in_time(request, limits.num_bytes, limit_s)
    if len(raw) <= _MAX_INLINE_BYTES:
        return parse(parse_json_object(raw))

    def take_apart() -> T:
        check_values(raw, limits.num_values)
        return parse(parse_json_object(raw))

    return await asyncio.to_thread(take_apart)


async def read_json_object(request: Request, limit_bytes: int, limit_s: float) -> dict[str, Any]:
    """A small body. Raises BodyTooLargeError before more than `limit_bytes` were kept, or as soon as more are announced; BodyTimeoutError,
    BodyEncodingError, MalformedBodyError, SurrogateError; ClientDisconnect."""
    return parse_json_object(await _read_in_time(request, limit_bytes, limit_s))


async def _read_in_time(request: Request, limit_bytes: int, limit_s: float) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise BodyTooLargeError(int(announced), limit_bytes)
    try:
        async with asyncio.timeout(limit_s):
            return await _read(request, limit_bytes)
    except TimeoutError:
        raise BodyTimeoutError(limit_s) from None


async def _read(request: Request, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > limit_bytes:
            raise BodyTooLargeError(num_bytes, limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def check_values(raw: bytes, limit: int) -> None:
    """Counts texts and separators before a parser makes objects of them without letting anybody else run. Raises TooManyValuesError."""
    if raw.count(b",") + raw.count(b'"') // 2 <= limit:
        return
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = raw.count(b'"') // 2
    if num_texts <= limit:
        num_texts += sum(between.count(b",") for between in raw.split(b'"')[::2])
    if num_texts > limit:
        raise TooManyValuesError("", f"{num_texts} values (numbers, texts, names of fields) or more", limit)


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Raises BodyEncodingError, MalformedBodyError, SurrogateError."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BodyEncodingError("", f"the body is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}; send JSON in UTF-8") from error
    try:
        body = json.loads(text, parse_constant=_no_constant, parse_float=_number)
        if _SURROGATE.search(raw):
            _check_text(body, "")
    except json.JSONDecodeError as error:
        raise MalformedBodyError("", f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise MalformedBodyError("", "the body is nested too deeply") from error
    except ValueError as error:  # Python's own bound, against numbers that take quadratic time to read
        raise MalformedBodyError("", f"a number in the body has more than {sys.get_int_max_str_digits()} digits: shorten it") from error
    if not isinstance(body, dict):
        raise MalformedBodyError("", f"the body is a JSON {_kind(body)}, it must be an object")
    return body


def _check_text(value: Any, path: str) -> None:
    """Raises SurrogateError for the first text, or name of a field, that is not Unicode."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SurrogateError(path, value) from error
    elif isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, str | list | dict):
                _check_text(item, f"{path}[{number}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            inside = f"{path}.{name}" if path else name
            _check_text(name, inside)
            _check_text(item, inside)


def _number(text: str) -> float | int:
    """JSON knows one kind of number: 16.0 is the integer 16 to its schemas and to clients whose language has no integers."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _no_constant(name: str) -> NoReturn:
    raise MalformedBodyError("", f"the body is not JSON: {name} is no JSON number")


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


__all__ = ["ClientDisconnect", "check_values", "parse_json_object", "read_body", "read_json_object"]
