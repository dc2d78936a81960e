"""Who may register a worker, and who may change the fleet: keys in `authorization: Bearer KEY`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from baton.servicekit import Watched, get_logger

log = get_logger(__name__)

#: Bytes below which a key could be guessed.
MIN_KEY_BYTES = 16

Context = grpc.aio.ServicerContext[Any, Any]


class BearerKeys:
    """All keys of one file; any of them opens, so that a new one can be spread before the old one goes."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Raises ValueError without a key and for one shorter than MIN_KEY_BYTES."""
        if not keys:
            raise ValueError("there is no key in it")
        for number, key in enumerate(keys, 1):
            if len(key) < MIN_KEY_BYTES:
                raise ValueError(f"key number {number} has {len(key)} bytes, at least {MIN_KEY_BYTES} are needed")
        self._digests = [hashlib.sha256(key).digest() for key in keys]

    def accept(self, presented: str) -> bool:
        """Takes the same time for every wrong key."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        return any(matches)


async def require_key(context: Context, keys: Watched[BearerKeys] | None, flag: str) -> None:
    """Ends the call with UNAUTHENTICATED unless it shows a key. Without `keys` everybody is let in."""
    if keys is None:
        return
    scheme, _, key = str(dict(context.invocation_metadata() or ()).get("authorization", "")).partition(" ")
    if scheme.lower() == "bearer" and keys.value.accept(key.strip()):
        return
    why = "it is none of those in the gateway's" if key else "there is none: send authorization: Bearer KEY with one of the gateway's"
    log.warning("refused for its key", peer=context.peer(), flag=flag, shown=bool(key))
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the call's key is refused: {why} {flag}")
