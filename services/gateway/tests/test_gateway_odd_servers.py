"""What no server of ours says: the request that it is said of fails by name, and the gateway goes on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, failure_of, greedy
from gateway_worker import ScriptedWorker

from baton.gateway.discovery.membership import Offer, Source
from baton.gateway.errors import MAX_MESSAGE_BYTES
from baton.gateway.room_failures import MAX_CAUSE_CHARS
from baton.gateway.worker import Leg
from baton.wire.v1 import common_pb2, worker_pb2

StackOf = Callable[..., Any]

NO_PROTOBUF = b"\xff\xff\xff\xff"


@contextlib.asynccontextmanager
async def unreadable_server() -> AsyncIterator[str]:
    """Takes sessions as a worker does, and says of itself what is no WorkerInfo; its address."""
    server = grpc.aio.server()

    async def describe(request: bytes, context: Any) -> bytes:
        return NO_PROTOBUF

    async def session(commands: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield worker_pb2.Report(load=worker_pb2.WorkerLoad(total_pages=5)).SerializeToString()
        async for _ in commands:
            pass

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Describe": grpc.unary_unary_rpc_method_handler(describe),
        "Session": grpc.stream_stream_rpc_method_handler(session),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Worker", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_server_that_cannot_be_read_is_a_problem_and_not_the_gateways_end(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(plain=1)  # which asserts that no task of the gateway's ended
    discovery = stack.gateway.discovery
    async with unreadable_server() as address:
        discovery.membership.put(Offer(Source.ADDED, address, Leg.PLAIN, address))
        discovery.places.sync()
        await eventually(lambda: any(address in text and "cannot be read" in text for text in stack.gateway.fleet.problems()))
        assert (await stack.reply()).text == "the answer is forty two"


@pytest.mark.parametrize("instance_id", ["x" * 100_000, "two\nlines", "-"])
async def test_a_server_of_an_impossible_name_is_not_used(stack_of: StackOf, instance_id: str) -> None:
    """It would stand in every line of the log, and in what clients are told."""
    stack: Stack = await stack_of(plain=1)
    (worker,) = stack.workers
    await worker.kill()
    stack.workers.append(await worker.successor(instance_id=instance_id).start())
    await eventually(lambda: any("is no instance id" in text for text in stack.gateway.fleet.problems()))
    assert max(map(len, stack.gateway.fleet.problems())) < 500
    assert not stack.gateway.fleet.ready


def finishing(reason: int) -> Callable[[ScriptedWorker, worker_pb2.Start], Any]:
    async def script(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        worker.event(start.room, prefill_started=worker_pb2.PrefillStarted())
        worker.tokens(start.room, 0, [100, 101])
        worker.event(start.room, finished=worker_pb2.Finished(reason=reason, completion_tokens=2))  # type: ignore[arg-type]

    return script


@pytest.mark.parametrize("reason", [common_pb2.FINISH_REASON_UNSPECIFIED, common_pb2.FINISH_REASON_TOOL_CALLS, 77])
async def test_an_end_for_a_reason_that_nobody_knows_is_the_servers_failure(stack_of: StackOf, reason: int) -> None:
    stack: Stack = await stack_of(plain=1)
    stack.script(decode=finishing(reason))
    code, failure = await failure_of(stack.call(ask(sampling=greedy(max_tokens=4))))
    assert (code, failure.cause, failure.origin) == (grpc.StatusCode.INTERNAL, "worker_protocol", common_pb2.ORIGIN_DECODE)
    assert str(reason) in failure.message
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
        whole = await client.post("/v1/completions", json=body)
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "worker_protocol")
        streamed = await client.post("/v1/completions", json=body | {"stream": True})
        assert "worker_protocol" in streamed.text.strip().split("\n")[-1]
    await stack.settled()


@pytest.mark.parametrize("origin", [common_pb2.ORIGIN_DECODE, common_pb2.ORIGIN_CLIENT])
async def test_a_failure_of_many_words_reaches_its_client(stack_of: StackOf, origin: common_pb2.Origin.ValueType) -> None:
    """gRPC's trailers hold 8 KiB: with more in them the client would be told of a broken stream, and of nothing else."""
    stack: Stack = await stack_of(plain=1, retries=0)

    async def script(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        worker.fail(
            start.room, grpc.StatusCode.INTERNAL, "engine_failed" * 20, "CUDA says: " + "\u1234\n" * 20_000 + "lower --num-pages", origin=origin
        )

    stack.script(decode=script)
    code, failure = await failure_of(stack.call())
    assert (code, failure.cause) == (grpc.StatusCode.INTERNAL, ("engine_failed" * 20)[:MAX_CAUSE_CHARS])
    assert len(failure.message.encode()) <= MAX_MESSAGE_BYTES
    assert failure.message.startswith("CUDA says: ")
    assert failure.message.endswith("lower --num-pages")
    await stack.settled()
