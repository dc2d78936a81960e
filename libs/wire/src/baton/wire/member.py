"""How a member of the fleet is written in etcd: one key a process, its value the `Member` message as JSON.

    /baton/members/decode-1f0c9a7be21d  {"instanceId": "decode-1f0c9a7be21d", "role": "ROLE_DECODE", "address": "10.0.0.2:8004", ...}

JSON, so that an operator can read it with etcdctl; a field that this version does not know is skipped, so that versions can be mixed.
"""

from __future__ import annotations

import re

from google.protobuf import json_format

from baton.wire.v1 import common_pb2, fleet_pb2

#: Of every member's lease, registered with a gateway or in etcd: less is hard to keep on a busy machine, more is no lease.
MIN_LEASE_S = 2
MAX_LEASE_S = 3600

#: As services make and check their own: it stands in every log line and in keys of etcd.
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_ADDRESS_CHARS = 300
#: Of a value that is refused.
_SHOWN_CHARS = 80

_ROLES = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_DECODE: "decode", common_pb2.ROLE_PLAIN: "plain"}


class MemberError(ValueError):
    """Something that is no member of a fleet; the message says why."""


def members_prefix(prefix: str) -> bytes:
    """Under which all members of the fleet at `prefix` ("/baton") are."""
    return f"{prefix.rstrip('/')}/members/".encode()


def member_key(prefix: str, instance_id: str) -> bytes:
    return members_prefix(prefix) + instance_id.encode()


def member_to_json(member: fleet_pb2.Member) -> bytes:
    text: str = json_format.MessageToJson(member, indent=None)
    return text.encode()


def member_from_json(value: bytes) -> fleet_pb2.Member:
    """Checked. Raises MemberError."""
    member = fleet_pb2.Member()
    try:
        json_format.Parse(value, member, ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise MemberError(f"it is no member: {error}") from error
    check_member(member)
    return member


def check_member(member: fleet_pb2.Member) -> None:
    """Raises MemberError that names the field and its value."""
    if not member.instance_id:
        raise MemberError("member.instance_id is empty")
    check_instance_id(member.instance_id, "member.instance_id")
    if member.role not in _ROLES:
        raise MemberError(f"member.role={member.role} is none of {', '.join(_ROLES.values())}")
    check_address(member.address, "member.address")
    if not member.model:
        raise MemberError("member.model is empty")


def check_instance_id(instance_id: str, field: str) -> None:
    """Raises MemberError."""
    if not _INSTANCE_ID.fullmatch(instance_id):
        allowed = "1 to 63 letters, digits, '.', '-' or '_', and the first is a letter or digit"
        raise MemberError(f"{field}={instance_id[:_SHOWN_CHARS]!r} is no instance id: it has {allowed}")


def check_address(address: str, field: str) -> None:
    """Raises MemberError when it is not host:port."""
    host, colon, port = address.rpartition(":")
    if len(address) > MAX_ADDRESS_CHARS or not (host and colon and port.isdecimal() and port.isascii() and 0 < int(port) <= 65535):
        raise MemberError(f"{field}={address[:_SHOWN_CHARS]!r} is not host:port")


def role_name(role: int) -> str:
    """ "prefill", "decode", "plain"; "unspecified" for a number that is none of them."""
    return _ROLES.get(role, "unspecified")  # type: ignore[call-overload, no-any-return]
