"""The bootstrap endpoint over a real connection; the transfer half is the loopback backend."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.engine.types import Failure
from baton.prefill.bootstrap import BootstrapServicer, Here
from baton.prefill.ticket_gate import TicketGate
from baton.servicekit import GrpcServer
from baton.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from baton.wire.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2

FINGERPRINT = common_pb2.KVFingerprint(protocol_version=1, model="tiny", dtype="float32", page_size=4)


class Session:
    """A decode server's side of one session."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = bootstrap_pb2_grpc.BootstrapStub(channel).Session()

    async def greet(self, decode: Any, **more: Any) -> bootstrap_pb2.FromPrefill:
        fields: dict[str, Any] = {"instance_id": decode.link.instance_id, "fingerprint": FINGERPRINT, "num_pages": 32}
        inbox = decode.agent.open_inbox("prefill-1", decode.region, 64)
        hello = bootstrap_pb2.DecodeHello(**(fields | {"invitation": inbox.invitation} | more))
        await self.call.write(bootstrap_pb2.FromDecode(hello=hello))
        return await self.read()

    async def read(self) -> Any:
        return await asyncio.wait_for(self.call.read(), 10)

    async def publish(self, room: int, **more: Any) -> None:
        fields: dict[str, Any] = {"lease_generation": 1, "num_tokens": 4, "pages": [common_pb2.Extent(first=0, count=1)]}
        await self.call.write(bootstrap_pb2.FromDecode(publish=bootstrap_pb2.Publish(room=room, **(fields | more))))


@pytest.fixture
async def served(prefill):
    servicer = BootstrapServicer(prefill.exporter, Here("prefill-1", FINGERPRINT, prefill.layout, prefill.memories), TicketGate("prefill-1", None))
    server = GrpcServer("127.0.0.1", 0, options=SERVER_OPTIONS)
    server.add(bootstrap_pb2_grpc.add_BootstrapServicer_to_server, servicer, "baton.v1.Bootstrap")
    await server.start()
    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        yield servicer, channel
    await servicer.close()
    await server.stop()


async def test_hello_verdict_publish_decline(served, prefill) -> None:
    _, channel = served
    session = Session(channel)
    first = await session.greet(prefill.decode())
    assert (first.hello.instance_id, first.hello.fingerprint) == ("prefill-1", FINGERPRINT)
    assert first.hello.identity == prefill.agent.identity
    verdict = (await session.read()).verdict
    assert verdict.transport == "loopback"
    assert [point.bytes for point in verdict.points] == [64 << 10, 1 << 20]
    prefill.exporter.refuse(7, Failure("UNAVAILABLE", "prefill", "draining", "no"))
    await session.publish(7)
    declined = (await session.read()).declined
    assert (declined.room, declined.lease_generation, declined.failure.cause) == (7, 1, "draining")
    await session.publish(8, num_tokens=400)
    assert (await session.read()).declined.failure.cause == "bad_publication"
    await session.call.write(bootstrap_pb2.FromDecode(revoke=bootstrap_pb2.Revoke(room=9, lease_generation=3)))
    assert (await session.read()).quiesced.lease_generation == 3


async def test_pools_that_differ_are_refused_with_both_values(served, prefill) -> None:
    _, channel = served
    session = Session(channel)
    theirs = common_pb2.KVFingerprint(protocol_version=1, model="tiny", dtype="bfloat16", page_size=4)
    assert (await session.greet(prefill.decode(), fingerprint=theirs)).hello.instance_id == "prefill-1"
    with pytest.raises(grpc.aio.AioRpcError, match="dtype: 'float32' here, 'bfloat16' there") as caught:
        await session.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "message",
    [
        bootstrap_pb2.FromDecode(),
        bootstrap_pb2.FromDecode(publish=bootstrap_pb2.Publish(room=1)),
        bootstrap_pb2.FromDecode(hello=bootstrap_pb2.DecodeHello()),
        # it would not fit into the trailers of any refusal
        bootstrap_pb2.FromDecode(hello=bootstrap_pb2.DecodeHello(instance_id="z" * 100_000)),
    ],
)
async def test_the_first_message_must_be_hello(served, message) -> None:
    session = Session(served[1])
    await session.call.write(message)
    with pytest.raises(grpc.aio.AioRpcError, match="must be hello") as caught:
        await session.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("invitation", [b"", b"not an invitation", bytes(300)])
async def test_a_damaged_invitation_is_refused(served, prefill, invitation) -> None:
    session = Session(served[1])
    await session.greet(prefill.decode(), invitation=invitation)
    with pytest.raises(grpc.aio.AioRpcError, match="cannot write to decode decode-1") as caught:
        await session.read()
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


async def _all_about(session: Session, room: int) -> None:
    while True:
        assert (await session.read()).declined.room == room


async def test_a_new_session_of_the_same_decode_server_replaces_the_old_one(served, prefill) -> None:
    """The old one may be half dead: its rooms end, its peer is closed, and only then the new one is served."""
    decode = prefill.decode()
    old, new = Session(served[1]), Session(served[1])
    await old.greet(decode)
    await old.read()
    prefill.agent.paused = True
    prefill.expect(7, num_tokens=4)
    await old.publish(7)
    await asyncio.to_thread(prefill.until, lambda: ("PublishedSlots", 7) in prefill.names())
    prefill.agent.paused = False
    await new.greet(decode)
    assert (await new.read()).verdict.transport == "loopback"
    failed = await asyncio.to_thread(prefill.until_over, 7)
    assert failed.failure.cause == "decode_lost"
    with pytest.raises(grpc.aio.AioRpcError, match="opened a new session"):
        await _all_about(old, room=7)  # a Declined may still get through; the end of the session says it for all of its rooms
    prefill.expect(8, num_tokens=4)
    await new.publish(8)
    await asyncio.to_thread(prefill.until, lambda: ("PublishedSlots", 8) in prefill.names())


async def _connected(served, prefill, room: int) -> tuple[Session, Any]:
    """A session, and the way that it wrote `room` over."""
    session = Session(served[1])
    await session.greet(prefill.decode())
    await session.read()
    await _published(session, prefill, room)
    (live,) = served[0]._sessions.values()
    return session, live.ways[0].peer


async def _published(session: Session, prefill, room: int) -> None:
    prefill.expect(room, num_tokens=4)
    await session.publish(room)
    await asyncio.to_thread(prefill.until, lambda: ("PublishedSlots", room) in prefill.names())


async def test_a_way_that_lost_what_it_went_through_here_is_laid_anew(served, prefill) -> None:
    """Into the same pages: the session goes on, and so does a room that came before anybody had noticed."""
    session, lost = await _connected(served, prefill, 7)
    await session.call.write(bootstrap_pb2.FromDecode(revoke=bootstrap_pb2.Revoke(room=7, lease_generation=1)))
    assert (await session.read()).quiesced.room == 7
    lost.break_off("address 192.0.2.1 of network device eth7 is gone", "address 192.0.2.1 of network device eth7")
    await _published(session, prefill, 8)
    (live,) = served[0]._sessions.values()
    assert live.ways[0].peer is not lost
    assert prefill.exporter.num_unmatched == 0
    prefill.start(8)
    prefill.compute(8, 0, 1)
    prefill.exporter.finish(8, 1)
    over = await asyncio.to_thread(prefill.until_over, 8)
    assert type(over).__name__ == "SendDone", over


async def test_a_room_whose_way_cannot_be_laid_anew_is_told_so(served, prefill) -> None:
    session, lost = await _connected(served, prefill, 7)
    await session.call.write(bootstrap_pb2.FromDecode(revoke=bootstrap_pb2.Revoke(room=7, lease_generation=1)))
    assert (await session.read()).quiesced.room == 7
    for decode in prefill.decodes:
        for inbox in decode.agent._own:
            inbox.fence(None)
    lost.break_off("eth7 is gone", "network device eth7")
    prefill.expect(8, num_tokens=4)
    await session.publish(8)
    failed = await asyncio.to_thread(prefill.until_over, 8)
    assert (failed.failure.code, failed.failure.origin, failed.failure.cause) == ("UNAVAILABLE", "transfer", "way_lost")
    with pytest.raises(grpc.aio.AioRpcError, match="network device eth7, and there is no other") as caught:
        await _all_about(session, room=8)
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_a_write_that_breaks_while_decode_stays_is_the_ways_fault(served, prefill) -> None:
    prefill.agent.paused = True
    session, lost = await _connected(served, prefill, 7)
    prefill.start(7)
    prefill.compute(7, 0, 1)
    prefill.agent.lose(lost)
    failed = await asyncio.to_thread(prefill.until_over, 7)
    assert (failed.failure.code, failed.failure.origin, failed.failure.cause) == ("UNAVAILABLE", "transfer", "way_lost")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _all_about(session, room=7)
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_the_end_of_a_session_ends_its_rooms(served, prefill) -> None:
    session = Session(served[1])
    await session.greet(prefill.decode())
    await session.read()
    prefill.expect(7, num_tokens=4)
    await session.publish(7)
    await session.publish(8)
    await asyncio.to_thread(prefill.until, lambda: prefill.exporter.num_unmatched == 1)
    session.call.cancel()
    failed = await asyncio.to_thread(prefill.until_over, 7)
    assert (failed.failure.code, failed.failure.origin, failed.failure.cause) == ("UNAVAILABLE", "decode", "decode_lost")
    await asyncio.to_thread(prefill.until, lambda: prefill.exporter.num_unmatched == 0)


async def test_a_path_that_breaks_ends_the_session(served, prefill) -> None:
    """Decode must fence what it cannot be told about: the session itself is the message."""
    session = Session(served[1])
    await session.greet(prefill.decode())
    await session.read()
    (peer,) = [peer for peer in prefill.agent._peers if peer is not prefill.decodes[0].peer]
    prefill.agent.lose(peer)
    with pytest.raises(grpc.aio.AioRpcError, match="the way to decode decode-1 broke") as caught:
        await session.read()
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_close_ends_sessions_in_order(served, prefill) -> None:
    servicer, channel = served
    session = Session(channel)
    await session.greet(prefill.decode())
    await session.read()
    await servicer.close()
    with pytest.raises(grpc.aio.AioRpcError, match="is stopping"):
        await session.read()
    late = Session(channel)
    await late.greet(prefill.decode("decode-2"))
    with pytest.raises(grpc.aio.AioRpcError, match="is stopping"):
        await late.read()
