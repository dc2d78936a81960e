"""The contract over real gRPC: what a gateway sees of a plain, a prefill and a decode server, and what becomes of rooms that it leaves."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2 as smg_common
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from baton.engine.types import Role
from baton.sglangcompat.rooms import room_number
from baton.wire.v1 import worker_pb2

PAIRING = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 3}
ROOM = room_number("chatcmpl-1", 3)


async def test_a_plain_server_streams_and_answers_whole(served, request_type) -> None:
    async with served(Role.PLAIN) as bench:
        *parts, last = await bench.ask(request_type("a", stream=True))
        assert [token for part in parts for token in part.chunk.token_ids] == [100, 101, 102, 103]
        assert parts[-1].chunk.completion_tokens == 4
        assert list(last.complete.output_ids) == [100, 101, 102, 103]
        assert (last.complete.finish_reason, last.complete.prompt_tokens, last.complete.completion_tokens) == ("length", 5, 4)
        (whole,) = await bench.ask(request_type("b"))
        assert whole.complete == last.complete
        assert whole.request_id == "b"


async def test_a_stop_token_is_named(served, request_type) -> None:
    async with served(Role.PLAIN) as bench:
        (whole,) = await bench.ask(request_type(stop_token_ids=[103]))
        assert (whole.complete.finish_reason, whole.complete.matched_token_id) == ("stop", 103)


@pytest.mark.parametrize("published_first", [False, True])
async def test_prefill_waits_for_the_decode_server_that_publishes_its_room(served, request_type, eventually, published_first) -> None:
    async with served(Role.PREFILL) as bench:
        if published_first:
            bench.publications.publishers[ROOM] = "decode-1"
        call = bench.stub.Generate(request_type(pairing=PAIRING, stream=True))
        await call.initial_metadata()  # the gateway waits for it before anything else
        if not published_first:
            await eventually(lambda: bench.claims.num_waiting == 1)
            bench.publications.tell(ROOM + 1, "decode-2")
            bench.publications.tell(ROOM, "decode-1")
        (last,) = [message async for message in call]
        assert list(last.complete.output_ids) == [100]
        assert bench.claims.num_waiting == 0
        assert bench.publications.refused == []


async def test_decode_learns_who_prefill_is_and_begins_with_its_token(served, request_type, eventually) -> None:
    async with served(Role.DECODE) as bench:
        asking = asyncio.create_task(bench.ask(request_type(pairing=PAIRING, stream=True)))
        await eventually(lambda: bench.named == [frozenset({"127.0.0.1:8998"})])
        assert not bench.engine.requests
        state = worker_pb2.PeerState(bootstrap_address="127.0.0.1:8998", prefill_instance_id="prefill-1")
        bench.front.peers_changed(worker_pb2.PeerStates(peers=[state]))
        *parts, last = await asking
        assert [token for part in parts for token in part.chunk.token_ids] == list(last.complete.output_ids) == [100, 101, 102, 103]
        assert last.complete.cached_tokens == 16
        await bench.ask(request_type("b", pairing=PAIRING))
        assert bench.named == [frozenset({"127.0.0.1:8998"})]


async def test_requests_without_their_other_half_end_with_what_is_missing(served, request_type) -> None:
    async with served(Role.PREFILL, timeout_s=0.1) as bench:
        with pytest.raises(grpc.aio.AioRpcError, match="no decode server published room") as caught:
            await bench.ask(request_type(pairing=PAIRING))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert bench.publications.refused[0] == (ROOM, "bootstrap_timeout")  # a publication that comes now is declined
    async with served(Role.DECODE, timeout_s=0.1) as bench:
        with pytest.raises(grpc.aio.AioRpcError, match=r"no session with the prefill server at 127.0.0.1:8998") as caught:
            await bench.ask(request_type(pairing=PAIRING))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # the gateway tries another pair
        with pytest.raises(grpc.aio.AioRpcError, match="--bootstrap-port"):
            await bench.ask(request_type(pairing=PAIRING | {"bootstrap_port": 0}))
    async with served(Role.PLAIN) as bench:
        with pytest.raises(grpc.aio.AioRpcError, match="this is a plain server"):
            await bench.ask(request_type(pairing=PAIRING))


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_a_request_that_is_left_gives_its_room_up(served, request_type, eventually, how) -> None:
    async with served(Role.PLAIN) as bench:
        bench.engine.hold = True
        call = bench.stub.Generate(request_type())
        await eventually(lambda: bool(bench.engine.requests))
        if how == "cancel":
            call.cancel()
        else:
            assert (await bench.stub.Abort(pb.AbortRequest(request_id="chatcmpl-1", reason="Stream dropped"))).success
            with pytest.raises(grpc.aio.AioRpcError, match="Stream dropped") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.CANCELLED
        await eventually(lambda: not bench.engine.requests)
        assert await bench.front.wait_idle(5)
        again = await bench.stub.Abort(pb.AbortRequest(request_id="chatcmpl-1", reason="Stream dropped"))
        assert (again.success, again.message) == (True, "no such request is open")
        assert len(bench.engine.aborted) == 1


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_a_prefill_request_that_is_left_while_it_waits(served, request_type, eventually, how) -> None:
    async with served(Role.PREFILL) as bench:
        call = bench.stub.Generate(request_type(pairing=PAIRING))
        await eventually(lambda: bench.claims.num_waiting == 1)
        if how == "cancel":
            call.cancel()
        else:
            await bench.stub.Abort(pb.AbortRequest(request_id="chatcmpl-1"))
            with pytest.raises(grpc.aio.AioRpcError, match="aborted the request"):
                await call.read()
        await eventually(lambda: bench.claims.num_waiting == 0)
        await eventually(lambda: bench.publications.refused[:1] == [(ROOM, "aborted" if how == "abort" else "client_left")])
        assert not bench.engine.requests


async def test_more_than_fit_are_refused(served, request_type, eventually) -> None:
    async with served(Role.PREFILL) as bench:
        calls = [bench.stub.Generate(request_type(name, pairing=PAIRING)) for name in ("a", "b")]
        await eventually(lambda: bench.claims.num_waiting == 2)
        with pytest.raises(grpc.aio.AioRpcError, match="the limit is 2") as caught:
            await bench.ask(request_type("c", pairing=PAIRING))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError, match="being answered already"):
            await bench.ask(request_type("a", pairing=PAIRING))
        assert bench.claims.num_waiting == 2
        for call in calls:
            call.cancel()


async def test_what_the_intake_refuses_is_refused_before_initial_metadata(served, request_type) -> None:
    async with served(Role.PLAIN) as bench:
        call = bench.stub.Generate(request_type(max_new_tokens=300))
        with pytest.raises(grpc.aio.AioRpcError, match=r"max_tokens=300 is outside \[1, 251\]") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not await call.initial_metadata()


async def test_draining_is_unhealthy_and_takes_nothing(served, request_type) -> None:
    async with served(Role.PLAIN) as bench:
        assert (await bench.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        bench.obstacle = "it has no inbox"
        said = await bench.stub.HealthCheck(pb.HealthCheckRequest())
        assert (said.healthy, said.message) == (False, "it has no inbox")
        bench.front.drain()
        assert (await bench.stub.HealthCheck(pb.HealthCheckRequest())).message == "draining"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.ask(request_type())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_who_calls_while_the_port_closes_is_told_why(served, request_type) -> None:
    async with served(Role.PLAIN) as bench:
        await bench.stub.HealthCheck(pb.HealthCheckRequest())  # it is connected
        bench.front.drain()
        closing = asyncio.create_task(bench.door.close())
        await asyncio.sleep(0)
        calls = [asyncio.create_task(bench.ask(request_type(str(number)))) for number in range(8)]
        for end in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(end, grpc.aio.AioRpcError)
            assert (end.code(), "draining" in (end.details() or "")) == (grpc.StatusCode.UNAVAILABLE, True), end
        await closing


async def test_what_the_gateway_asks_of_a_server(served, model_folder) -> None:
    async with served(Role.DECODE) as bench:
        model = await bench.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.vocab_size, model.max_context_length, list(model.eos_token_ids)) == ("tiny", 1000, 256, [2])
        server = await bench.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.server_args["page_size"], server.server_args["disaggregation_mode"]) == (16, "decode")
        assert server.max_total_num_tokens == 512
        loads = await bench.stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
        assert (loads.loads[0].max_total_num_tokens, loads.loads[0].disaggregation.mode) == (512, "decode")
        parts = [part async for part in bench.stub.GetTokenizer(smg_common.GetTokenizerRequest())]
        data = b"".join(part.data for part in parts)
        assert parts[-1].sha256 == hashlib.sha256(data).hexdigest()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.namelist() == ["config.json", "tokenizer.json"]


async def test_what_it_has_not_is_said(served) -> None:
    async with served(Role.PLAIN) as bench:
        with pytest.raises(grpc.aio.AioRpcError, match="has not adapters") as caught:
            await bench.stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="GetLoads"):
            await bench.stub.SubscribeKvEvents(smg_common.SubscribeKvEventsRequest()).read()
