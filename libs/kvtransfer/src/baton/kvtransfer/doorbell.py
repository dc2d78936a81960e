"""The doorbell: one 64-byte record, written one-sided after the pages were flushed.

It may be read while it is being written, so its last word is a checksum over the other seven; a record that does not check is not there yet. The
native core reads and writes the same layout (doorbell.hpp); a test holds the two together.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from baton.kvtransfer.checks import whole
from baton.kvtransfer.errors import InvalidArgument

RECORD_BYTES = 64

#: The sender finished: every page of the room is in place.
STATUS_OK = 0
#: The negative acknowledgement: the sender will not write this room (any more), and what it had posted is flushed. Any status but OK means that.
STATUS_DECLINED = 1

_BODY = struct.Struct("<QIIIiQQQQ")
_WORDS = struct.Struct("<7Q")
_CHECKSUM = struct.Struct("<Q")
_MASK = (1 << 64) - 1
_SEED = 0x6261746F6E4B5631
_MULTIPLIER = 0x9FB21C651E98DF25


@dataclass(frozen=True, slots=True)
class Doorbell:
    """What the sender says about one room.

    room: single use, never 0. generation: of the receiver's lease. num_tokens: tokens whose KV is in place. first_token: -1 when there is none.
    status: STATUS_OK, or why not (negative acknowledgement). digest: of the bytes that were sent, when `has_digest`: whichever both sides compute.
    last_layer_ns: the sender's monotonic clock when the last layer was computed; comparable on one host only.
    """

    room: int
    generation: int
    num_tokens: int = 0
    first_token: int = -1
    status: int = STATUS_OK
    digest: int = 0
    has_digest: bool = False
    last_layer_ns: int = 0

    def __post_init__(self) -> None:
        whole("doorbell room", self.room, 1, _MASK)
        whole("doorbell generation", self.generation, 1, 2**32 - 1)
        whole("doorbell num_tokens", self.num_tokens, 0, 2**32 - 1)
        whole("doorbell first_token", self.first_token, -(2**31), 2**31 - 1)
        whole("doorbell status", self.status, 0, 2**16 - 1)
        whole("doorbell digest", self.digest, 0, _MASK)
        whole("doorbell last_layer_ns", self.last_layer_ns, 0, _MASK)


def checksum(words: tuple[int, ...]) -> int:
    """Of the record's first seven words. Never 0, so that zeroed memory is no record."""
    state = _SEED
    for word in words:
        state = ((state ^ word) * _MULTIPLIER) & _MASK
        state ^= state >> 32
    return state or 1


def encode(doorbell: Doorbell, inbox_nonce: int) -> bytes:
    """The record for an inbox; `inbox_nonce` (from its invitation) keeps a record of a former process from ringing."""
    flags = doorbell.status | (int(doorbell.has_digest) << 16)
    body = _BODY.pack(
        doorbell.room,
        doorbell.generation,
        flags,
        doorbell.num_tokens,
        doorbell.first_token,
        doorbell.digest,
        doorbell.last_layer_ns,
        inbox_nonce,
        0,
    )
    return body + _CHECKSUM.pack(checksum(_WORDS.unpack(body)))


def decode(record: bytes, inbox_nonce: int) -> Doorbell | None:
    """The doorbell in `record`, or None: nothing written yet, torn, forged or for another inbox."""
    if len(record) != RECORD_BYTES:
        raise InvalidArgument(f"doorbell record of {len(record)} bytes, must be {RECORD_BYTES}")
    body = record[: RECORD_BYTES - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(record, len(body))[0] != checksum(_WORDS.unpack(body)):
        return None
    room, generation, flags, num_tokens, first_token, digest, last_layer_ns, nonce, _ = _BODY.unpack(body)
    if nonce != inbox_nonce or room == 0 or generation == 0:
        return None
    return Doorbell(room, generation, num_tokens, first_token, flags & 0xFFFF, digest, bool(flags >> 16 & 1), last_layer_ns)
