"""The bootstrap endpoint against any bytes and any order of messages: a session may be refused or ended, the next one works, and nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.engine.types import Failure
from baton.prefill.bootstrap import BootstrapServicer, Here
from baton.prefill.ticket_gate import TicketGate
from baton.servicekit import GrpcServer
from baton.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from baton.wire.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2

FINGERPRINT = common_pb2.KVFingerprint(protocol_version=1, model="tiny", dtype="float32", page_size=4)
#: UNKNOWN would be an exception of ours. OK stands for INTERNAL with gRPC's own words for a client that was refused while it was still writing.
REFUSED = {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
STILL_WRITING = "Internal error from Core"

u32 = st.one_of(st.sampled_from([0, 1, 4, 31, 32, 33, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))
rooms = st.one_of(st.sampled_from([0, 7, 8, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
extents = st.lists(st.builds(common_pb2.Extent, first=u32, count=u32), max_size=4)
failures = st.builds(common_pb2.Failure, code=st.integers(-5, 40), cause=st.text(max_size=5), message=st.text(max_size=5))
publishes = st.builds(
    bootstrap_pb2.Publish,
    room=rooms,
    lease_generation=u32,
    pages=extents,
    num_tokens=u32,
    resident_tokens=u32,
    doorbell=u32,
    digest=st.booleans(),
)
revokes = st.builds(bootstrap_pb2.Revoke, room=rooms, lease_generation=u32, failure=failures)
#: `invitation`: None stands for a genuine one.
hellos = st.fixed_dictionaries(
    {"instance_id": st.sampled_from(["decode-1", "", "x" * 500, "é"]), "num_pages": st.one_of(st.just(32), u32)},
    optional={
        "invitation": st.binary(max_size=40),
        "fingerprint": st.just(common_pb2.KVFingerprint(model="other")),
        "page_hash": st.text(max_size=5),
    },
)
messages = st.lists(publishes.map(lambda one: {"publish": one}) | revokes.map(lambda one: {"revoke": one}) | st.just({}), max_size=5)
conversations = st.tuples(st.none() | hellos, messages, st.none() | st.binary(min_size=1, max_size=40))


def examples(count: int) -> list[Any]:
    found: list[Any] = []

    @settings(deadline=None, max_examples=max(count, settings().max_examples), suppress_health_check=list(HealthCheck))
    @given(conversations)
    def collect(one: Any) -> None:
        found.append(one)

    collect()
    return found


async def talk(channel: grpc.aio.Channel, raw: Sequence[bytes]) -> grpc.StatusCode:
    """Sends all of it, hears all of the answers, and hangs up."""
    call: Any = channel.stream_stream("/baton.v1.Bootstrap/Session", request_serializer=lambda data: data)()
    try:
        for message in raw:
            await call.write(message)
        await call.done_writing()
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    code = await call.code()
    if code is grpc.StatusCode.INTERNAL and await call.details() == STILL_WRITING:
        return grpc.StatusCode.OK
    assert code in REFUSED | {grpc.StatusCode.OK}, f"{code}: {await call.details()}"
    return code


@pytest.mark.timeout(900)
async def test_any_conversation(prefill) -> None:
    gate = TicketGate("prefill-1", None)
    servicer = BootstrapServicer(prefill.exporter, Here("prefill-1", FINGERPRINT, prefill.layout, prefill.memories), gate)
    server = GrpcServer("127.0.0.1", 0, options=SERVER_OPTIONS)
    server.add(bootstrap_pb2_grpc.add_BootstrapServicer_to_server, servicer, "baton.v1.Bootstrap")
    await server.start()
    decode = prefill.decode("decode-1")
    genuine = decode.agent.open_inbox("prefill-1", decode.region, 64).invitation
    prefill.expect(7)  # a room that a publication may meet
    prefill.start(7)
    prefill.compute(7)
    try:
        async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
            seen = set()
            for hello, later, trailing in examples(100):
                raw = []
                if hello is not None:
                    fields = {"invitation": genuine, "fingerprint": FINGERPRINT} | hello
                    raw.append(bootstrap_pb2.FromDecode(hello=bootstrap_pb2.DecodeHello(**fields)).SerializeToString())
                raw += [bootstrap_pb2.FromDecode(**one).SerializeToString() for one in later]
                seen.add(await asyncio.wait_for(talk(channel, raw + ([] if trailing is None else [trailing])), 20))
            assert {grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT} <= seen
            prefill.exporter.abort(7, Failure("CANCELLED", "client", "client_gone", "left"))
            prefill.names()
            assert (prefill.exporter.num_rooms, prefill.exporter.num_unmatched) == (0, 0)
            await good_session(channel, decode, genuine)
    finally:
        await servicer.close()
        await server.stop()


async def good_session(channel: grpc.aio.Channel, decode: Any, invitation: bytes) -> None:
    call: Any = bootstrap_pb2_grpc.BootstrapStub(channel).Session()
    hello = bootstrap_pb2.DecodeHello(instance_id="decode-1", fingerprint=FINGERPRINT, num_pages=32, invitation=invitation)
    await call.write(bootstrap_pb2.FromDecode(hello=hello))
    assert (await asyncio.wait_for(call.read(), 10)).WhichOneof("message") == "hello"
    assert (await asyncio.wait_for(call.read(), 10)).WhichOneof("message") == "verdict"
    call.cancel()
