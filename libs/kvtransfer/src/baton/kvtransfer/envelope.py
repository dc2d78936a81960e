"""The envelope of everything that travels between two processes: magic, version, fields, checksum. Never pickle; safe on hostile bytes.

4 bytes magic | u16 version | u16 number of fields | fields: u16 tag, u32 length, bytes | u64 xxh3-64 of all before
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import xxhash

from baton.kvtransfer.errors import IncompatiblePeer, InvalidArgument

MAX_BYTES = 1 << 20

_HEAD = struct.Struct("<4sHH")
_FIELD = struct.Struct("<HI")
_SUM = struct.Struct("<Q")


def seal(magic: bytes, version: int, fields: Mapping[int, bytes]) -> bytes:
    parts = [_HEAD.pack(magic, version, len(fields))]
    for tag, value in fields.items():
        parts += [_FIELD.pack(tag, len(value)), value]
    body = b"".join(parts)
    if len(body) + _SUM.size > MAX_BYTES:
        raise InvalidArgument(f"{magic.decode()} of {len(body)} bytes is longer than {MAX_BYTES}")
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def unseal(what: str, magic: bytes, version: int, data: bytes) -> dict[int, bytes]:
    """The fields of `data`. Raises InvalidArgument for damaged bytes and IncompatiblePeer for another version; `what` names the thing."""
    if not _HEAD.size + _SUM.size <= len(data) <= MAX_BYTES:
        raise InvalidArgument(f"{what} of {len(data)} bytes, must be {_HEAD.size + _SUM.size} to {MAX_BYTES}")
    body, (checksum,) = data[: -_SUM.size], _SUM.unpack_from(data, len(data) - _SUM.size)
    found_magic, found_version, num_fields = _HEAD.unpack_from(body)
    if found_magic != magic:
        raise InvalidArgument(f"{what} starts with {found_magic!r}, must be {magic!r}: these bytes are something else")
    if checksum != xxhash.xxh3_64_intdigest(body):
        raise InvalidArgument(f"{what} is damaged: its checksum does not match its {len(body)} bytes")
    if found_version != version:
        raise IncompatiblePeer(f"{what} has version {found_version}, this side speaks version {version}")
    return _fields(what, body, num_fields)


def _fields(what: str, body: bytes, num_fields: int) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    position = _HEAD.size
    for _ in range(num_fields):
        if position + _FIELD.size > len(body):
            raise InvalidArgument(f"{what} ends inside the head of field number {len(fields)}")
        tag, length = _FIELD.unpack_from(body, position)
        position += _FIELD.size
        if length > len(body) - position or tag in fields:
            raise InvalidArgument(f"{what} has a field {tag} that is too long ({length} bytes) or there twice")
        fields[tag] = body[position : position + length]
        position += length
    if position != len(body):
        raise InvalidArgument(f"{what} has {len(body) - position} bytes after its last field")
    return fields
