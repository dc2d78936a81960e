"""What a caller gave, held against its limits before anything acts on it."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from baton.kvtransfer.errors import InvalidArgument


def whole(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """`value` as an int within [low, high]. Raises InvalidArgument, for 1.5 too: the native core would cut it to 1."""
    try:
        number = index(value)
    except TypeError:
        raise InvalidArgument(f"{name}={value!r} is a {type(value).__name__}, must be a whole number") from None
    if not low <= number <= high:
        raise InvalidArgument(f"{name}={number} is outside [{low}, {high}]")
    return number


def room_number(value: SupportsIndex) -> int:
    """A room: single use, never 0, 64 bits."""
    return whole("room", value, 1, (1 << 64) - 1)
