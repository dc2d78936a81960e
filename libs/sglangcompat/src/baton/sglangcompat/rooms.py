"""The number of a request's room, which both servers must find without asking one another. Pure."""

from __future__ import annotations

import hashlib

_DOMAIN = b"baton sglang room\0"


def room_number(request_id: str, bootstrap_room: int) -> int:
    """In [1, 2**63 - 1], the same on every server. The gateway draws 31 bits for a room, too few for numbers that are used once in a fleet's life;
    its request ids are random, and both servers are given the same."""
    text = _DOMAIN + bootstrap_room.to_bytes(8, "big", signed=True) + request_id.encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    return number or 1
