"""What reads bytes of another process, each as a function of bytes: it takes them or refuses them by its own error, and does nothing else.

`seeds` are sound inputs, which a fuzzer damages. Where bytes carry a checksum or a signature, a second form of the target puts it right first, so
that what lies behind it is reached.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash
from google.protobuf.message import DecodeError, Message

from baton.engine.layout import KVLayout
from baton.engine.types import Role
from baton.gateway.errors import RequestError
from baton.gateway.http.body import parse_json_object
from baton.gateway.http.parse import parse_chat, parse_completion
from baton.gateway.sampling import check_ranges, fill
from baton.kvtransfer import Doorbell, IncompatiblePeer, InvalidArgument, routes
from baton.kvtransfer import doorbell as records
from baton.kvtransfer.identity import Identity
from baton.kvtransfer.invitation import Invitation, Window
from baton.kvtransfer.invitation import Way as SecondWay
from baton.prefill.errors import BadPublicationError, TicketRefusedError
from baton.prefill.link import DecodeLink, Way
from baton.prefill.publication import read_publication
from baton.prefill.ticket_gate import TicketGate
from baton.wire import ticket as tickets
from baton.wire.member import MemberError, member_from_json, member_to_json
from baton.wire.ticket import TicketError, TicketKeys
from baton.wire.v1 import bootstrap_pb2, common_pb2, fleet_pb2, worker_pb2
from baton.workerkit import Limits, RefusedError
from baton.workerkit.convert import failure_from_wire
from baton.workerkit.intake import take

NONCE = 77
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, num_pages=32, itemsize=4)
ONLY_WAY = Way(*routes(1, 1, 1), peer=None)  # type: ignore[arg-type]  # nothing is written
LINK = DecodeLink("decode-1", [ONLY_WAY], LAYOUT, "xxh3-64", lambda message: None, lambda reason: None)
LIMITS = Limits(Role.PREFILL, vocab_size=1000, max_model_len=512, num_pages=64, page_size=16)
KEYS = TicketKeys([b"s" * 32])
GATE = TicketGate("prefill-1", None)
SOUND_IDENTITY = Identity("prefill-1", "boot", 1, 2, 3, 4)
SOUND_WINDOW = Window(4096, 1 << 20, b"key")
SOUND_INVITATION = Invitation(
    "ucx",
    "tcp",
    "prefill-1",
    SOUND_IDENTITY,
    NONCE,
    64,
    b"worker",
    SOUND_WINDOW,
    SOUND_WINDOW,
    SOUND_WINDOW,
    SOUND_WINDOW,
    SecondWay(b"another worker", b"key", b"key", b"key", b"key"),
    fingerprint={"a": "b"},
)
SOUND_DOORBELL = Doorbell(7, 1, num_tokens=9, first_token=5)
SOUND_CLAIMS = common_pb2.TicketClaims(room=7, prefill_instance_id="prefill-1", decode_instance_id="decode-1", expires_at_ms=1 << 50)
SOUND_PUBLISH = bootstrap_pb2.Publish(room=7, lease_generation=1, pages=[common_pb2.Extent(first=0, count=3)], num_tokens=10, doorbell=1)
SOUND_START = worker_pb2.Start(
    room=7,
    prompt_token_ids=[1, 2, 3],
    sampling=worker_pb2.Sampling(top_p=1, max_tokens=4),
    prefill=worker_pb2.PrefillLeg(decode_instance_id="decode-1"),
)
SOUND_MEMBER = fleet_pb2.Member(instance_id="decode-1", role=common_pb2.ROLE_DECODE, address="127.0.0.1:8004", model="tiny")


@dataclass(frozen=True)
class Target:
    """`refusals`: how it says no. Any other exception is a fault."""

    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...]

    def __call__(self, data: bytes) -> bool:
        """Whether it took the bytes."""
        try:
            self.run(data)
        except self.refusals:
            return False
        return True


def doorbell(data: bytes) -> None:
    found = records.decode(data, NONCE)
    assert found is None or records.decode(records.encode(found, NONCE), NONCE) == found


def doorbell_summed(data: bytes) -> None:
    body = data[:56].ljust(56, b"\0")
    doorbell(body + records.checksum(tuple(int.from_bytes(body[at : at + 8], "little") for at in range(0, 56, 8))).to_bytes(8, "little"))


def summed(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """With the envelope's checksum put right."""
    return lambda data: decode(data + xxhash.xxh3_64_intdigest(data).to_bytes(8, "little"))


def invitation(data: bytes) -> None:
    found = Invitation.decode(data)
    assert Invitation.decode(found.encode()) == found


def identity(data: bytes) -> None:
    found = Identity.decode(data)
    assert Identity.decode(found.encode()) == found


def from_decode(data: bytes) -> None:
    """A message on a bootstrap session."""
    message = bootstrap_pb2.FromDecode.FromString(data)
    match message.WhichOneof("message"):
        case "publish":
            GATE.check(message.publish, "decode-1")
            publication = read_publication(message.publish, LINK)
            assert len(publication.pages) == LAYOUT.pages_for(publication.num_tokens)
            assert publication.pages.max() < LAYOUT.num_pages
        case "revoke":
            failure_from_wire(message.revoke.failure, default_origin="decode")


def from_prefill(data: bytes) -> None:
    message = bootstrap_pb2.FromPrefill.FromString(data)
    if message.WhichOneof("message") == "declined":
        failure_from_wire(message.declined.failure, default_origin="prefill")


def start(data: bytes) -> None:
    """A room as a worker takes it from a gateway."""
    request = take(worker_pb2.Start.FromString(data), LIMITS, time.monotonic())
    assert 0 < request.room < 2**63
    assert all(0 <= token < LIMITS.vocab_size for token in request.prompt)


def ticket(data: bytes) -> None:
    KEYS.verify(common_pb2.RoomTicket.FromString(data))


def ticket_signed(data: bytes) -> None:
    """Claims that are no claims, under a genuine signature."""
    forged = KEYS.sign(common_pb2.TicketClaims())
    forged.claims = data
    forged.mac = tickets._mac(b"s" * 32, data)
    KEYS.verify(forged)


def body(parse: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], object]:
    def run(data: bytes) -> None:
        parsed = parse(parse_json_object(data))
        check_ranges(parsed.sampling, 1000, lambda: 512)
        fill(parsed.sampling, parsed.sampling.max_tokens or 16, (2,))

    return run


def _raw(**message: Message) -> bytes:
    return bootstrap_pb2.FromDecode(**message).SerializeToString()


ENVELOPE = (InvalidArgument, IncompatiblePeer)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 0.5, "stop": ["a"], "stream": True}
COMPLETION = {"model": "tiny", "prompt": [1, 2], "seed": -1, "top_p": 0.5, "stop_token_ids": [3]}

TARGETS = {
    "doorbell": Target(doorbell, (records.encode(SOUND_DOORBELL, NONCE),), (InvalidArgument,)),
    "doorbell-summed": Target(doorbell_summed, (records.encode(SOUND_DOORBELL, NONCE)[:56],), ()),
    "identity": Target(identity, (SOUND_IDENTITY.encode(),), ENVELOPE),
    "identity-summed": Target(summed(identity), (SOUND_IDENTITY.encode()[:-8],), ENVELOPE),
    "invitation": Target(invitation, (SOUND_INVITATION.encode(),), ENVELOPE),
    "invitation-summed": Target(summed(invitation), (SOUND_INVITATION.encode()[:-8],), ENVELOPE),
    "from-decode": Target(
        from_decode,
        (_raw(publish=SOUND_PUBLISH), _raw(revoke=bootstrap_pb2.Revoke(room=7, lease_generation=1))),
        (DecodeError, BadPublicationError, TicketRefusedError),
    ),
    "from-prefill": Target(from_prefill, (bootstrap_pb2.FromPrefill(declined=bootstrap_pb2.Declined(room=7)).SerializeToString(),), (DecodeError,)),
    "start": Target(start, (SOUND_START.SerializeToString(),), (DecodeError, RefusedError)),
    "ticket": Target(ticket, (KEYS.sign(SOUND_CLAIMS).SerializeToString(),), (DecodeError, TicketError)),
    "ticket-signed": Target(ticket_signed, (SOUND_CLAIMS.SerializeToString(),), (TicketError,)),
    "member": Target(member_from_json, (member_to_json(SOUND_MEMBER),), (MemberError,)),
    "chat-body": Target(body(parse_chat), (json.dumps(CHAT).encode(),), (RequestError,)),
    "completion-body": Target(body(parse_completion), (json.dumps(COMPLETION).encode(),), (RequestError,)),
}
