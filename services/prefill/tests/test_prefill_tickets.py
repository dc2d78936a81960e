"""Who may publish: tickets over the real bootstrap endpoint, and the memory of used ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.prefill.bootstrap import BootstrapServicer, Here
from baton.prefill.config import load_settings
from baton.prefill.errors import TicketRefusedError
from baton.prefill.ticket_gate import TicketGate
from baton.servicekit import GrpcServer, SettingsError, Watched, watch_secrets
from baton.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from baton.wire.ticket import TicketKeys
from baton.wire.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2

FINGERPRINT = common_pb2.KVFingerprint(protocol_version=1, model="tiny", dtype="float32", page_size=4)
SECRET = "the gateway's and prefill's, and nobody else's"
KEYS = TicketKeys([SECRET.encode()])
STRANGER = TicketKeys([b"a secret that this fleet has never heard of"])


def ticket(room: int, keys: TicketKeys = KEYS, **changes: Any) -> common_pb2.RoomTicket:
    said = {"room": room, "prefill_instance_id": "prefill-1", "decode_instance_id": "decode-1", "expires_at_ms": round(time.time() * 1e3) + 60_000}
    return keys.sign(common_pb2.TicketClaims(**(said | changes)))


def forged(room: int) -> common_pb2.RoomTicket:
    """Another room's, with this one's number written into it."""
    whole = ticket(room + 1)
    claims = common_pb2.TicketClaims.FromString(whole.claims)
    claims.room = room
    whole.claims = claims.SerializeToString()
    return whole


class Publisher:
    """A decode server's session with a prefill server that demands tickets."""

    def __init__(self, servicer: BootstrapServicer, gate: TicketGate, channel: grpc.aio.Channel) -> None:
        self.servicer = servicer
        self.gate = gate
        self.channel = channel

    async def connect(self, decode: Any) -> None:
        self.call: Any = bootstrap_pb2_grpc.BootstrapStub(self.channel).Session()
        inbox = decode.agent.open_inbox("prefill-1", decode.region, 64)
        hello = {"instance_id": decode.link.instance_id, "fingerprint": FINGERPRINT, "num_pages": 32, "invitation": inbox.invitation}
        await self.call.write(bootstrap_pb2.FromDecode(hello=bootstrap_pb2.DecodeHello(**hello)))
        await self.read()
        assert (await self.read()).verdict.transport == "loopback"

    async def read(self) -> bootstrap_pb2.FromPrefill:
        message = await asyncio.wait_for(self.call.read(), 10)
        assert isinstance(message, bootstrap_pb2.FromPrefill)
        return message

    async def publish(self, room: int, shown: common_pb2.RoomTicket | None) -> None:
        publish = bootstrap_pb2.Publish(room=room, lease_generation=1, num_tokens=4, pages=[common_pb2.Extent(first=0, count=1)], ticket=shown)
        await self.call.write(bootstrap_pb2.FromDecode(publish=publish))

    async def refusal(self, room: int, shown: common_pb2.RoomTicket | None) -> common_pb2.Failure:
        await self.publish(room, shown)
        declined = (await self.read()).declined
        assert (declined.room, declined.lease_generation) == (room, 1)
        return declined.failure


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "tickets"
    path.write_text(SECRET + "\n")
    return path


@pytest.fixture
async def open_publisher(prefill):
    """Serves with these secrets (None: tickets are off), and connects decode-1."""
    ends: list[Callable[[], Any]] = []

    async def make(keys: Watched[TicketKeys] | None) -> Publisher:
        gate = TicketGate("prefill-1", keys)
        servicer = BootstrapServicer(prefill.exporter, Here("prefill-1", FINGERPRINT, prefill.layout, prefill.memories), gate)
        server = GrpcServer("127.0.0.1", 0, options=SERVER_OPTIONS)
        server.add(bootstrap_pb2_grpc.add_BootstrapServicer_to_server, servicer, "baton.v1.Bootstrap")
        await server.start()
        channel = grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS)
        ends.extend((channel.close, servicer.close, server.stop))
        publisher = Publisher(servicer, gate, channel)
        await publisher.connect(prefill.decode())
        return publisher

    yield make
    for end in ends:
        await end()


@pytest.fixture
async def publisher(open_publisher, secret_file) -> Publisher:
    opened: Publisher = await open_publisher(watch_secrets("--ticket-secret-file", secret_file, TicketKeys))
    return opened


async def test_a_room_with_its_ticket_is_taken(publisher, prefill) -> None:
    prefill.expect(7, num_tokens=4)
    await publisher.publish(7, ticket(7))
    await asyncio.to_thread(prefill.until, lambda: ("PublishedSlots", 7) in prefill.names())
    assert publisher.gate.counters == {}


@pytest.mark.parametrize(
    ("shown", "cause", "says"),
    [
        (None, "ticket_missing", "same --ticket-secret-file"),
        (ticket(7, STRANGER), "ticket_key_unknown", "same --ticket-secret-file"),
        (forged(7), "ticket_forged", "not genuine"),
        (ticket(8), "ticket_wrong_room", "the ticket of room 8"),
        (ticket(7, decode_instance_id="decode-2"), "ticket_wrong_decode", "decode server 'decode-2'"),
        (ticket(7, prefill_instance_id="prefill-2"), "ticket_wrong_prefill", "prefill server 'prefill-2'"),
        (ticket(7, expires_at_ms=round(time.time() * 1e3) - 5_000), "ticket_expired", "expired"),
    ],
)
async def test_what_is_wrong_is_refused_counted_and_named_and_the_room_goes_on(publisher, prefill, shown, cause, says) -> None:
    """The room waits for whoever may publish it: a stranger's attempt must not end it."""
    prefill.expect(7, num_tokens=4)
    failure = await publisher.refusal(7, shown)
    assert failure.cause == cause
    assert "decode-1 published room 7" in failure.message
    assert says in failure.message
    assert publisher.gate.counters == {cause: 1}
    assert prefill.exporter.counters[f"declined/{cause}"] == 1
    assert prefill.names() == []
    await publisher.publish(7, ticket(7))
    await asyncio.to_thread(prefill.until, lambda: ("PublishedSlots", 7) in prefill.names())


async def test_a_ticket_is_used_once(publisher, prefill) -> None:
    used = ticket(7)
    prefill.expect(7, num_tokens=4)
    await publisher.publish(7, used)
    await asyncio.to_thread(prefill.until, lambda: ("PublishedSlots", 7) in prefill.names())
    failure = await publisher.refusal(7, used)
    assert (failure.cause, failure.code) == ("ticket_replayed", grpc.StatusCode.PERMISSION_DENIED.value[0])


async def test_a_malformed_publication_needs_a_ticket_too(publisher, prefill) -> None:
    """Else it could end a room that its sender may not publish."""
    prefill.expect(7, num_tokens=4)
    publish = bootstrap_pb2.Publish(room=7, lease_generation=1, num_tokens=400)
    await publisher.call.write(bootstrap_pb2.FromDecode(publish=publish))
    assert (await publisher.read()).declined.failure.cause == "ticket_missing"
    assert prefill.names() == []


async def test_a_ticket_that_nobody_here_can_check_is_refused_and_says_where_to_put_the_secret(open_publisher) -> None:
    publisher = await open_publisher(None)
    failure = await publisher.refusal(7, ticket(7))
    assert (failure.cause, failure.origin) == ("ticket_unchecked", common_pb2.ORIGIN_PREFILL)
    assert "give gateways and prefill server prefill-1 the same --ticket-secret-file" in failure.message


async def test_a_new_secret_is_taken_without_a_restart(open_publisher, secret_file, prefill) -> None:
    secrets = watch_secrets("--ticket-secret-file", secret_file, TicketKeys)
    publisher = await open_publisher(secrets)
    assert (await publisher.refusal(7, ticket(7, STRANGER))).cause == "ticket_key_unknown"
    secret_file.write_text(f"{SECRET}\na secret that this fleet has never heard of\n")
    secrets.refresh()
    assert secrets.refresh()
    prefill.expect(7, num_tokens=4)
    await publisher.publish(7, ticket(7, STRANGER))
    await asyncio.to_thread(prefill.until, lambda: ("PublishedSlots", 7) in prefill.names())


def test_tickets_and_a_port_for_gateways_that_sign_none_exclude_each_other() -> None:
    flags = ["--model-path", "m", "--ticket-secret-file", "f"]
    assert load_settings(flags, {}).sglang.port is None
    with pytest.raises(SettingsError, match="--sglang-port and --ticket-secret-file exclude each other"):
        load_settings([*flags, "--sglang-port", "0"], {})


def test_used_tickets_are_forgotten_when_they_have_expired_and_never_before(secret_file) -> None:
    now = 1_000.0
    gate = TicketGate("prefill-1", watch_secrets("--ticket-secret-file", secret_file, TicketKeys), clock=lambda: now, max_used=3)

    def show(room: int, expires_at_s: float) -> str:
        shown = ticket(room, expires_at_ms=round(expires_at_s * 1e3))
        try:
            gate.check(bootstrap_pb2.Publish(room=room, ticket=shown), "decode-1")
        except TicketRefusedError as error:
            return error.failure.cause
        return "taken"

    assert [show(1, 1_020), show(2, 1_010), show(3, 1_030)] == ["taken"] * 3
    assert show(4, 1_040) == "ticket_memory_full"
    assert show(1, 1_020) == "ticket_replayed"
    now = 1_010.0
    assert show(2, 1_010) == "ticket_expired"
    assert show(4, 1_040) == "taken"  # in the place of the second
    assert [show(room, at) for room, at in ((1, 1_020), (3, 1_030), (4, 1_040))] == ["ticket_replayed"] * 3
