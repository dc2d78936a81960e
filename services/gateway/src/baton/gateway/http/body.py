"""Reading a request's body: bounded, UTF-8, JSON, an object. Each thing that can be wrong has its own error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from baton.gateway.errors import BodyEncodingError, BodyTimeoutError, BodyTooLargeError, MalformedBodyError

#: Longer bodies are decoded on a thread: about a millisecond of work.
_MAX_INLINE_BYTES = 256 * 1024

#: How much of the rest of a body that is too large is read, and how long that may take.
_DISCARD_BYTES = 64 * 1024 * 1024
_DISCARD_S = 5.0


async def read_json_object(request: Request, limit_bytes: int, limit_s: float) -> dict[str, Any]:
    """Raises BodyTooLargeError before more than `limit_bytes` were kept, BodyTimeoutError, BodyEncodingError, MalformedBodyError;
    ClientDisconnect."""
    try:
        async with asyncio.timeout(limit_s):
            raw = await _read(request, limit_bytes)
    except TimeoutError:
        raise BodyTimeoutError(limit_s) from None
    if len(raw) <= _MAX_INLINE_BYTES:
        return parse_json_object(raw)
    return await asyncio.to_thread(parse_json_object, raw)


async def _read(request: Request, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    stream = request.stream()
    async for chunk in stream:
        num_bytes += len(chunk)
        if num_bytes > limit_bytes:
            raise BodyTooLargeError(num_bytes + await _discard(stream), limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


async def _discard(stream: AsyncIterator[bytes]) -> int:
    """Reads on, within bounds, so that a client that is still sending gets to read the answer; how many bytes came."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            async for chunk in stream:
                num_bytes += len(chunk)
                if num_bytes > _DISCARD_BYTES:
                    break
    return num_bytes


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Raises BodyEncodingError, MalformedBodyError."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BodyEncodingError("", f"the body is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}; send JSON in UTF-8") from error
    try:
        body = json.loads(text, parse_constant=_no_constant, parse_float=_number)
    except json.JSONDecodeError as error:
        raise MalformedBodyError("", f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise MalformedBodyError("", "the body is nested too deeply") from error
    except ValueError as error:  # Python's own bound, against numbers that take quadratic time to read
        raise MalformedBodyError("", f"a number in the body has more than {sys.get_int_max_str_digits()} digits: shorten it") from error
    if not isinstance(body, dict):
        raise MalformedBodyError("", f"the body is a JSON {_kind(body)}, it must be an object")
    return body


def _number(text: str) -> float | int:
    """JSON knows one kind of number: 16.0 is the integer 16 to its schemas and to clients whose language has no integers."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _no_constant(name: str) -> NoReturn:
    raise MalformedBodyError("", f"the body is not JSON: {name} is no JSON number")


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


__all__ = ["ClientDisconnect", "parse_json_object", "read_json_object"]
