"""The Worker contract over a real connection."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from baton.wire.status import failure_from_error
from baton.wire.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc


async def test_a_room_from_start_to_finish(bench, gateway_type) -> None:
    async with gateway_type(bench) as gateway:
        await gateway.start(7, max_tokens=3)
        finished = await gateway.read_until(7, "finished")
        assert gateway.tokens == {7: [100, 101, 102]}
        assert finished.finished.completion_tokens == 3
        assert finished.finished.reason == common_pb2.FINISH_REASON_LENGTH
        kinds = [event.WhichOneof("event") for event in gateway.events]
        assert kinds == ["prefill_started", "finished"]
        assert gateway.events[0].at_ms >= 0
        assert gateway.load is not None
        assert gateway.load.total_pages == 8


async def test_one_step_is_one_report_with_the_tokens_of_all_rooms(bench, gateway_type) -> None:
    bench.engine.hang.clear()
    async with gateway_type(bench) as gateway:
        for room in (1, 2, 3):
            await gateway.start(room, max_tokens=1)
        await gateway.read()  # the load
        await asyncio.sleep(0.2)
        bench.engine.hang.set()
        for room in (1, 2, 3):
            await gateway.read_until(room, "finished")
    # the first start began a step of its own; what came while it hung is one step
    assert gateway.reports <= 4


async def test_a_slow_reader_gets_fewer_and_longer_reports(bench, gateway_type, eventually) -> None:
    async with gateway_type(bench) as gateway:
        await gateway.read()
        await gateway.start(1, prompt=[1], max_tokens=30)
        await eventually(lambda: bench.engine.sent.get(1) == 30)
        await gateway.read_until(1, "finished")
        assert gateway.tokens[1] == list(range(100, 130))


@pytest.mark.parametrize(
    ("more", "cause", "said"),
    [
        ({"room": 0}, "room_missing", "room=0"),
        ({"room": 2**63}, "room_missing", str(2**63)),
        ({"prefill": worker_pb2.PrefillLeg(decode_instance_id="d")}, "wrong_leg", "leg=prefill"),
        ({"prompt": []}, "prompt_empty", "at least 1"),
        ({"prompt": [999, 1000]}, "token_out_of_range", "token 1000"),
        ({"prompt": [1] * 64}, "prompt_too_long", "64 tokens"),
        ({"prompt": [1] * 60, "max_tokens": 5}, "max_tokens_out_of_range", "max_tokens=5 is outside [1, 4]"),
        ({"max_tokens": 0}, "max_tokens_out_of_range", "max_tokens=0"),
        ({"prompt": [1] * 30, "max_tokens": 3}, "kv_pool_too_small", "9 KV pages for 33 tokens"),
        ({"sampling": worker_pb2.Sampling(temperature=float("nan"))}, "sampling_out_of_range", "temperature=nan"),
        ({"sampling": worker_pb2.Sampling(top_p=1.5)}, "sampling_out_of_range", "top_p=1.5"),
        ({"sampling": worker_pb2.Sampling(min_tokens=9)}, "sampling_out_of_range", "min_tokens=9"),
        ({"sampling": worker_pb2.Sampling(stop_token_ids=range(129))}, "sampling_out_of_range", "129 tokens, the limit is 128"),
        ({"sampling": worker_pb2.Sampling(stop_token_ids=[1, 2**31])}, "token_out_of_range", "stop_token_ids has token 2147483648"),
    ],
)
async def test_a_start_that_cannot_be_served_is_refused(bench, gateway_type, more, cause, said) -> None:
    room = more.pop("room", 5)
    async with gateway_type(bench) as gateway:
        await gateway.start(room, **more)
        event = await gateway.read_until(room, "failed")
        assert event.failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert event.failed.cause == cause
        assert said in event.failed.message
        assert event.failed.origin == common_pb2.ORIGIN_DECODE
        await gateway.start(6)
        await gateway.read_until(6, "finished")
    assert [(room, failure.cause) for room, failure in bench.refused] == [(room, cause)]
    assert list(bench.engine.requests) == []


async def test_a_room_is_single_use(bench, gateway_type) -> None:
    async with gateway_type(bench) as gateway:
        await gateway.start(7, max_tokens=1)
        await gateway.read_until(7, "finished")
        await gateway.start(7, max_tokens=1)
        event = await gateway.read_until(7, "failed")
        assert event.failed.cause == "room_used"
        assert bench.refused == []  # nobody else may be told that this room failed: its first use may still run


async def test_too_many_rooms(bench, gateway_type) -> None:
    bench.engine.hold = True
    async with gateway_type(bench) as gateway:
        for room in range(1, 6):
            await gateway.start(room)
        event = await gateway.read_until(5, "failed")
        assert event.failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert "the limit is 4" in event.failed.message


async def test_abort_ends_a_room_with_the_given_failure(bench, gateway_type) -> None:
    bench.engine.hold = True
    async with gateway_type(bench) as gateway:
        await gateway.start(7)
        await gateway.read_until(7, "prefill_started")
        failure = common_pb2.Failure(code=1, origin=common_pb2.ORIGIN_CLIENT, cause="client_gone", message="left")
        await gateway.send(abort=worker_pb2.Abort(room=7, failure=failure))
        await gateway.send(abort=worker_pb2.Abort(room=7, failure=failure))
        await gateway.send(abort=worker_pb2.Abort(room=12345, failure=failure))
        event = await gateway.read_until(7, "failed")
        assert (event.failed.code, event.failed.origin, event.failed.cause) == (1, common_pb2.ORIGIN_CLIENT, "client_gone")
        assert event.failed.stage == common_pb2.ROOM_STATE_SUCCESS
    assert [room for room, _ in bench.engine.aborted] == [7]


async def test_a_failed_room_is_logged_and_counted_with_author_stage_and_times(bench, gateway_type) -> None:
    bench.engine.hold = True
    with capture_logs() as lines:
        async with gateway_type(bench) as gateway:
            await gateway.start(7, deadline_ms=5000)
            await gateway.read_until(7, "prefill_started")
            failure = common_pb2.Failure(code=1, origin=common_pb2.ORIGIN_CLIENT, cause="client_gone", message="left")
            await gateway.send(abort=worker_pb2.Abort(room=7, failure=failure))
            await gateway.read_until(7, "failed")
    (line,) = [line for line in lines if line["event"] == "room failed"]
    assert {name: line[name] for name in ("origin", "stage", "cause", "allowed_ms")} == {
        "origin": "client",
        "stage": "SUCCESS",
        "cause": "client_gone",
        "allowed_ms": 5000,
    }
    assert line["elapsed_ms"] >= 0
    assert bench.front.counters["failed/client/SUCCESS/client_gone"] == 1


async def test_the_end_of_a_session_ends_its_rooms_and_no_others(bench, gateway_type, eventually) -> None:
    bench.engine.hold = True
    async with gateway_type(bench, "gateway-1") as first, gateway_type(bench, "gateway-2") as second:
        await first.start(1)
        await second.start(2)
        await first.read_until(1, "prefill_started")
        await second.read_until(2, "prefill_started")
        first.call.cancel()
        await eventually(lambda: 1 not in bench.engine.requests)
        assert [(room, failure.code, failure.cause) for room, failure in bench.engine.aborted] == [(1, "UNAVAILABLE", "gateway_lost")]
        bench.engine.hold = False
        bench.host.wake()
        await second.read_until(2, "finished")


async def test_a_half_closed_session_is_an_ended_one(bench, gateway_type, eventually) -> None:
    bench.engine.hold = True
    async with gateway_type(bench) as gateway:
        await gateway.start(1)
        await gateway.read_until(1, "prefill_started")
        await gateway.call.done_writing()
        await eventually(lambda: bool(bench.engine.aborted))


async def test_the_first_command_must_be_attach(bench, gateway_type) -> None:
    async with bench.channel() as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(worker_pb2.Command(drain=worker_pb2.Drain()))
        with pytest.raises(grpc.aio.AioRpcError, match="must be attach") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert not bench.front.draining


async def test_attach_twice_ends_the_session(bench, gateway_type) -> None:
    async with gateway_type(bench) as gateway:
        await gateway.send(attach=gateway.attach)
        with pytest.raises(grpc.aio.AioRpcError, match="attach came twice"):
            await gateway.read_until(1, "never")


async def test_drain_refuses_new_rooms_and_finishes_old_ones(bench, gateway_type) -> None:
    bench.engine.hold = True
    async with gateway_type(bench) as gateway:
        await gateway.start(1)
        await gateway.read_until(1, "prefill_started")
        await gateway.send(drain=worker_pb2.Drain())
        await gateway.start(2)
        event = await gateway.read_until(2, "failed")
        assert (event.failed.code, event.failed.cause) == (grpc.StatusCode.UNAVAILABLE.value[0], "draining")
        assert gateway.draining
        assert not await bench.front.wait_idle(0.05)
        bench.engine.hold = False
        bench.host.wake()
        await gateway.read_until(1, "finished")
        assert await bench.front.wait_idle(5)
        info = await worker_pb2_grpc.WorkerStub(gateway.channel).Describe(worker_pb2.DescribeRequest())
        assert info.draining
        assert info.fingerprint.model == "tiny"


async def test_peers_are_the_union_of_what_gateways_say(bench, gateway_type, eventually) -> None:
    async with gateway_type(bench, "g1") as first:
        async with gateway_type(bench, "g2") as second:
            await first.send(peers=worker_pb2.Peers(bootstrap_addresses=["a:1", "b:2"]))
            await eventually(lambda: bench.peers[-1:] == [frozenset({"a:1", "b:2"})])
            await second.send(peers=worker_pb2.Peers(bootstrap_addresses=["b:2", "c:3"]))
            await eventually(lambda: bench.peers[-1] == frozenset({"a:1", "b:2", "c:3"}))
        await eventually(lambda: bench.peers[-1] == frozenset({"a:1", "b:2"}))


@pytest.mark.parametrize(
    ("limit", "cause", "said"),
    [
        ({"deadline_ms": 150}, "deadline", "the request's deadline of 150 ms"),
        ({"waiting_timeout_ms": 150}, "waiting_timeout", "the waiting timeout of 150 ms"),
    ],
)
async def test_a_limit_is_kept_without_any_other_traffic(bench, gateway_type, limit, cause, said) -> None:
    bench.engine.hold = True
    bench.engine.add = lambda request: bench.engine.requests.update({request.room: request})  # no milestone: it stays in WAITING
    async with gateway_type(bench) as gateway:
        began = time.monotonic()
        await gateway.start(7, **limit)
        event = await gateway.read_until(7, "failed")
        assert 0.14 < time.monotonic() - began < 2
        assert (event.failed.code, event.failed.cause) == (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], cause)
        assert said in event.failed.message
        assert event.failed.allowed_ms == 150
        assert event.failed.elapsed_ms >= 150
        assert event.failed.stage == common_pb2.ROOM_STATE_WAITING


async def test_an_engine_that_breaks_fails_all_rooms_and_refuses_more(bench, gateway_type, eventually) -> None:
    bench.engine.hold = True
    async with gateway_type(bench) as gateway:
        await gateway.start(1)
        await gateway.start(2)
        await gateway.read_until(2, "prefill_started")
        bench.engine.break_with = ValueError("matrix of the wrong shape")
        bench.host.wake()
        for room in (1, 2):
            event = await gateway.read_until(room, "failed")
            assert (event.failed.code, event.failed.cause) == (grpc.StatusCode.INTERNAL.value[0], "engine_failed")
            assert "matrix of the wrong shape" in event.failed.message
        await gateway.start(3)
        event = await gateway.read_until(3, "failed")
        assert event.failed.cause == "engine_failed"
    await eventually(lambda: len(bench.lost) == 1)
    assert await bench.front.wait_idle(1)


async def test_direct_requests_are_refused_with_the_way_to_the_gateway(bench, gateway_type) -> None:
    async with bench.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="none has attached") as caught:
            await anext(aiter(stub.Generate(inference_pb2.GenerateRequest(text="x"))))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        async with gateway_type(bench) as gateway:
            await gateway.read()
            for call in (stub.Generate(inference_pb2.GenerateRequest()), stub.Chat(inference_pb2.ChatRequest())):
                with pytest.raises(grpc.aio.AioRpcError, match=r"plain server.*gate\.example:50060"):
                    await anext(aiter(call))
            with pytest.raises(grpc.aio.AioRpcError, match=r"gate\.example:50060") as caught:
                await stub.ListModels(inference_pb2.ListModelsRequest())
            assert failure_from_error(caught.value, origin=common_pb2.ORIGIN_CLIENT, cause="?").cause == "direct_request"


async def test_sessions_end_after_their_last_report(bench, gateway_type) -> None:
    async with gateway_type(bench) as gateway:
        await gateway.start(1, max_tokens=2)
        await gateway.read_until(1, "finished")
        await gateway.start(0)
        await gateway.read_until(0, "failed")
        await gateway.start(2, max_tokens=2)
        assert await bench.front.wait_idle(5)
        bench.front.end_sessions()
        with pytest.raises(AssertionError, match="the stream ended"):
            await gateway.read_until(3, "never")
        assert await gateway.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("attached", [False, True])
async def test_bytes_that_are_no_command_end_their_session_and_its_rooms_only(bench, gateway_type, attached) -> None:
    async with gateway_type(bench) as other, bench.channel() as channel:
        call = channel.stream_stream("/baton.v1.Worker/Session", request_serializer=lambda data: data)()
        if attached:
            await call.write(worker_pb2.Command(attach=worker_pb2.Attach(gateway_id="g")).SerializeToString())
            await call.read()
        await call.write(b"\xff\xff\xff")
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert (await call.code(), "cannot be read" in await call.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        await other.start(7, max_tokens=3)
        await other.read_until(7, "finished")
