"""Room tickets: the gateway's signed word on who may publish a room where. Signing and verifying, no files and no clock.

HMAC-SHA256 and not Ed25519: the secret lies with gateways and prefill servers only. Decode servers, the ones that are kept from publishing
each other's rooms, carry tickets and cannot make them. A signature then needs nothing but the standard library and costs microseconds a room.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from baton.wire.v1 import common_pb2

#: Bytes below which a secret could be guessed.
MIN_SECRET_BYTES = 32

_DOMAIN = b"baton.v1.RoomTicket\0"


class TicketError(Exception):
    """Root of what is wrong with a ticket. `cause`: a bounded word for metrics."""

    cause = "ticket"


class TicketMalformedError(TicketError):
    cause = "ticket_malformed"


class TicketKeyUnknownError(TicketError):
    """Signed with a secret that is not among those here: most likely two files that should be one."""

    cause = "ticket_key_unknown"


class TicketForgedError(TicketError):
    """The signature is not the secret's, or the claims were changed after they were signed."""

    cause = "ticket_forged"


class TicketKeys:
    """The secrets of one fleet. The first signs; all verify, so that a new one can be spread before it is used."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """Raises ValueError without a secret, for one shorter than MIN_SECRET_BYTES, and for one that is there twice."""
        if not secrets:
            raise ValueError("there is no secret in it")
        for number, secret in enumerate(secrets, 1):
            if len(secret) < MIN_SECRET_BYTES:
                raise ValueError(f"secret number {number} has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed")
        self._secrets = {_key_id(secret): secret for secret in secrets}
        if len(self._secrets) != len(secrets):
            raise ValueError("a secret is in it twice")
        self.signing_id = _key_id(secrets[0])

    @property
    def key_ids(self) -> list[str]:
        """Names of the secrets, which say nothing of them."""
        return list(self._secrets)

    def sign(self, claims: common_pb2.TicketClaims) -> common_pb2.RoomTicket:
        raw = claims.SerializeToString(deterministic=True)
        return common_pb2.RoomTicket(key_id=self.signing_id, claims=raw, mac=_mac(self._secrets[self.signing_id], raw))

    def verify(self, ticket: common_pb2.RoomTicket) -> common_pb2.TicketClaims:
        """What the ticket says, once its signature is known to be right; whether it fits the occasion is the caller's question.

        Raises TicketKeyUnknownError, TicketForgedError, TicketMalformedError.
        """
        secret = self._secrets.get(ticket.key_id)
        if secret is None:
            raise TicketKeyUnknownError(f"it was signed with secret {ticket.key_id[:8]!r}, known here: {', '.join(self.key_ids)}")
        if not hmac.compare_digest(_mac(secret, ticket.claims), ticket.mac):
            raise TicketForgedError(f"its signature is not that of secret {ticket.key_id!r}")
        try:
            return common_pb2.TicketClaims.FromString(ticket.claims)
        except DecodeError as error:
            raise TicketMalformedError(f"its claims cannot be read: {error}") from error


def _mac(secret: bytes, claims: bytes) -> bytes:
    return hmac.digest(secret, _DOMAIN + claims, "sha256")


def _key_id(secret: bytes) -> str:
    return hashlib.sha256(b"baton ticket key id\0" + secret).hexdigest()[:8]
