"""What a failure tells its client beside its cause: when to come again, and its times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, greedy
from gateway_worker import silence
from google.rpc import error_details_pb2, status_pb2

from baton.wire.status import DETAILS_KEY

StackOf = Callable[..., Any]


def details_of(error: grpc.aio.AioRpcError) -> list[Any]:
    raw = next(value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY)
    assert isinstance(raw, bytes)
    return list(status_pb2.Status.FromString(raw).details)


async def test_overload_says_when_to_come_again_and_a_mistake_does_not(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(max_rooms=1, max_queue=0)
    stack.script(silence, silence)
    call = stack.call()
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    kinds = {packed.TypeName(): packed for packed in details_of(caught.value)}
    retry, info = error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
    assert kinds["google.rpc.RetryInfo"].Unpack(retry)
    assert kinds["google.rpc.ErrorInfo"].Unpack(info)
    assert retry.retry_delay.seconds == 1
    assert (info.reason, info.metadata["origin"]) == ("OVERLOADED", "gateway")
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        refused = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        wrong = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 0})
        assert (wrong.status_code, "retry-after" in wrong.headers) == (400, False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply(ask(sampling=greedy(max_tokens=0)))
    assert "google.rpc.RetryInfo" not in {packed.TypeName() for packed in details_of(caught.value)}
    call.cancel()


async def test_a_failed_room_tells_its_times_over_http(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(bootstrap_timeout_s=0.2)
    stack.script(silence, silence)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        error = (await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})).json()["error"]
    assert (error["origin"], error["stage"], error["code"], error["allowed_ms"]) == ("gateway", "BOOTSTRAPPING", "bootstrap_timeout", 200)
    assert error["elapsed_ms"] >= 200
