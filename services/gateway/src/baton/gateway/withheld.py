"""What clients are not told: where servers are. They get stage, origin with its instance id, and cause; addresses are for operators. Pure."""

from __future__ import annotations

import re

from baton.gateway.errors import GatewayError, sendable
from baton.wire.v1 import common_pb2

#: host:port as Baton writes it, and as gRPC's core does, with schemes and percent-encoded brackets; IPv4 without a port too. A name has a letter
#: and a port of two digits or more: `cuda:0` is none.
_ADDRESS = (
    r"(?<![\w.\-])(?:(?:ipv[46]|dns):/{0,3})?(?:"
    r"(?:\[|%5B)[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%(?:25)?\w+)?(?:\]|%5D)(?::\d{1,5})?"
    r"|\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?"
    r"|(?=[\w.\-]*[A-Za-z])[A-Za-z0-9](?:[\w.\-]*\w)?:\d{2,5}"
    r")(?![\w])"
)
_AT_ADDRESS = re.compile(r" at " + _ADDRESS)
_ANY_ADDRESS = re.compile(_ADDRESS)

WITHHELD = "(an address that the log has)"


def without_addresses(text: str) -> str:
    """`text` with every address of a server taken out of it."""
    return _ANY_ADDRESS.sub(WITHHELD, _AT_ADDRESS.sub("", text))


def told_text(error: GatewayError) -> str:
    """The error in words, for the client. A mistake of its own is told in its own words, which are never a server's address."""
    return str(error) if error.failure().origin == common_pb2.ORIGIN_CLIENT else without_addresses(str(error))


def told(failure: common_pb2.Failure) -> common_pb2.Failure:
    """The same for a failure, with a message that gRPC's trailers have room for."""
    copy = common_pb2.Failure()
    copy.CopyFrom(failure)
    copy.message = sendable(failure.message if failure.origin == common_pb2.ORIGIN_CLIENT else without_addresses(failure.message))
    return copy
