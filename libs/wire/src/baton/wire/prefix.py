"""Names for blocks of prompts that a gateway and its workers agree on: hashes under the gateway's key (worker.proto, PrefixBlocks). Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
ID_BYTES = 8
#: BLAKE2b's own limit.
MAX_KEY_BYTES = 64


def first_digest(key: bytes, salt: bytes) -> bytes:
    """D(0): of nothing yet, under the salt of a tenant, in UTF-8."""
    return blake2b(salt, key=key, digest_size=DIGEST_BYTES).digest()


def next_digest(before: bytes, tokens: bytes) -> bytes:
    """D(n). tokens: of one page, as `token_bytes` has them."""
    return blake2b(before + tokens, digest_size=DIGEST_BYTES).digest()


def block_id(digest: bytes) -> int:
    """What is said of a block."""
    return int.from_bytes(digest[:ID_BYTES], "little")


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return little_endian(array("I", tokens).tobytes())


def little_endian(tokens: bytes) -> bytes:
    """The same token ids, which are in this machine's order."""
    if sys.byteorder == "little":
        return tokens
    data = array("I", tokens)
    data.byteswap()
    return data.tobytes()


def block_ids(key: bytes, salt: str, tokens: Sequence[int], block_size: int, max_blocks: int) -> list[int]:
    """Of the leading whole blocks of `tokens`, `max_blocks` at most."""
    num_blocks = min(len(tokens) // block_size, max_blocks)
    data = token_bytes(tokens[: num_blocks * block_size])
    step = len(data) // num_blocks if num_blocks else 1
    digest, ids = first_digest(key, salt.encode()), []
    for start in range(0, len(data), step):
        digest = next_digest(digest, data[start : start + step])
        ids.append(block_id(digest))
    return ids
