"""The queue and the keys' limits in a real gateway, at both fronts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, greedy
from gateway_worker import silence
from google.rpc import error_details_pb2, status_pb2

from baton.servicekit import KeyLimits, KeyRole, new_key

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, list[str]]:
    """A file with two keys; the second may have one request at a time and three in a minute."""
    made = [new_key(KeyRole.CLIENT), new_key(KeyRole.CLIENT, KeyLimits(max_concurrent=1, requests_per_minute=3, tokens_in_flight=200))]
    path = tmp_path / "keys"
    path.write_text("".join(record.line() + "\n" for _, record in made))
    return path, [text for text, _ in made]


def bearer(key: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


async def test_a_request_waits_for_its_place_and_is_answered(stack_of) -> None:
    stack: Stack = await stack_of(max_rooms=1)
    stack.script(silence, silence)
    first = stack.call()
    await stack.prefill.next_start()
    second = asyncio.create_task(stack.reply())
    await eventually(lambda: stack.gateway.gate.num_waiting == 1)
    stack.script()
    first.cancel()
    reply = await second
    assert reply.text == "the answer is forty two"
    assert reply.last.report.states[0].start_ms > 0
    await stack.settled()
    assert stack.gateway.gate.counters == {"queued": 1, "let_in": 1}


@pytest.mark.parametrize("front", ["grpc", "http"])
async def test_a_client_that_goes_while_it_waits_is_forgotten(stack_of, front: str) -> None:
    stack: Stack = await stack_of(max_rooms=1)
    stack.script(silence, silence)
    first = stack.call()
    await stack.prefill.next_start()
    gate = stack.gateway.gate
    if front == "grpc":
        waiting = stack.call()
        await eventually(lambda: gate.num_waiting == 1)
        waiting.cancel()
    else:
        async with httpx.AsyncClient(base_url=stack.http) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await eventually(lambda: gate.num_waiting == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: gate.num_waiting == 0)
    assert gate.counters["left"] == 1
    first.cancel()
    await stack.settled()
    assert len(stack.prefill.starts) == 1


async def test_a_deadline_passes_in_the_queue(stack_of) -> None:
    stack: Stack = await stack_of(max_rooms=1, request_timeout_s=0.5)
    stack.script(silence, silence)
    stack.gateway.rooms.max_rooms = 0
    async with httpx.AsyncClient(base_url=stack.http) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "queue_deadline")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "queue_deadline" in str(caught.value.details())


async def test_a_full_queue_is_told_with_a_time_at_both_fronts(stack_of) -> None:
    stack: Stack = await stack_of(max_rooms=1, max_queue=1)
    stack.script(silence, silence)
    first = stack.call()
    await stack.prefill.next_start()
    waiting = stack.call()
    await eventually(lambda: stack.gateway.gate.num_waiting == 1)
    async with httpx.AsyncClient(base_url=stack.http) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"], answer.json()["error"]["type"]) == (429, "1", "rate_limit_error")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay_s(caught.value) == 1
    for call in (first, waiting):
        call.cancel()
    await stack.settled()


def retry_delay_s(error: grpc.aio.AioRpcError) -> int:
    raw = dict(error.trailing_metadata())["grpc-status-details-bin"]
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status_pb2.Status.FromString(raw).details if detail.Is(retry.DESCRIPTOR))
    return int(retry.retry_delay.seconds)


async def test_a_keys_limits_hold_at_both_fronts_and_are_given_back(stack_of, keys: Any) -> None:
    path, (_, limited) = keys
    stack: Stack = await stack_of(api_key_file=path)
    stack.script(silence, silence)
    first = stack.stub.Generate(ask(), metadata=bearer(limited), timeout=20)
    await stack.prefill.next_start()
    async with httpx.AsyncClient(base_url=stack.http, headers=dict(bearer(limited))) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (429, "key_concurrency", "1")
        first.cancel()
        await stack.settled()
        await eventually(lambda: stack.gateway.shares._accounts[limited.split("-")[1]].num_open == 0)
        stack.script()
        answer = await client.post("/v1/completions", json=BODY | {"max_tokens": 300})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "key_tokens")
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "key_rate")
        assert 20 <= int(answer.headers["retry-after"]) <= 61
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.stub.Generate(ask(), metadata=bearer(limited)).read()
    assert (caught.value.code(), retry_delay_s(caught.value) > 10) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert stack.gateway.shares.counters == {"key_concurrency": 1, "key_tokens": 1, "key_rate": 2}


async def test_answers_count_against_a_key_not_requests(stack_of, tmp_path: Path) -> None:
    """Several of one request as much as those of several requests; what fits only an empty account is told to wait, what never fits is a mistake."""
    key, record = new_key(KeyRole.CLIENT, KeyLimits(max_concurrent=4))
    path = tmp_path / "four"
    path.write_text(record.line() + "\n")
    stack: Stack = await stack_of(api_key_file=path)
    stack.script(silence, silence)
    async with httpx.AsyncClient(base_url=stack.http, headers=dict(bearer(key))) as client:
        for body, param in (({"n": 5}, "n"), ({"prompt": ["a", "b", "c"], "n": 2}, "prompt")):
            answer = await client.post("/v1/completions", json=BODY | body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, param, "out_of_range"), error
            assert "[1, 4]" in error["message"]
            assert "max_concurrent" in error["message"]
        with pytest.raises(grpc.aio.AioRpcError, match="max_concurrent") as caught:
            await stack.stub.Generate(ask(sampling=greedy(n=5)), metadata=bearer(key)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not stack.prefill.starts
        first = stack.stub.Generate(ask(sampling=greedy(n=3)), metadata=bearer(key), timeout=20)
        await stack.prefill.next_start()
        answer = await client.post("/v1/completions", json=BODY | {"n": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "key_concurrency")
        first.cancel()
        await stack.settled()
        stack.script()
        await eventually(lambda: not len(stack.gateway.shares))
        assert (await client.post("/v1/completions", json=BODY | {"prompt": ["a", "b"], "n": 2})).status_code == 200


async def test_two_keys_share_a_busy_gateway(stack_of, keys: Any, tmp_path: Path) -> None:
    made = [new_key(KeyRole.CLIENT), new_key(KeyRole.CLIENT)]
    path = tmp_path / "two"
    path.write_text("".join(record.line() + "\n" for _, record in made))
    stack: Stack = await stack_of(api_key_file=path, max_rooms=1)
    order: list[int] = []

    async def one(number: int) -> None:
        messages = [message async for message in stack.stub.Generate(ask(), metadata=bearer(made[number][0]), timeout=60)]
        assert messages[-1].finish_reason
        order.append(number)

    stack.script(silence, silence)
    first = stack.call_with = stack.stub.Generate(ask(), metadata=bearer(made[0][0]))
    await stack.prefill.next_start()
    flood = [asyncio.create_task(one(0)) for _ in range(12)]
    await eventually(lambda: stack.gateway.gate.num_waiting == 12)
    few = [asyncio.create_task(one(1)) for _ in range(3)]
    await eventually(lambda: stack.gateway.gate.num_waiting == 15)
    stack.script()
    first.cancel()
    await asyncio.gather(*flood, *few)
    assert [place for place, number in enumerate(order) if number == 1][-1] <= 7, order
    await stack.settled()


async def test_a_priority_goes_to_the_servers_and_its_range_is_said(split: Stack) -> None:
    await split.reply(ask(priority=-7))
    async with httpx.AsyncClient(base_url=split.http) as client:
        assert (await client.post("/v1/completions", json=BODY | {"priority": 9})).status_code == 200
        answer = await client.post("/v1/completions", json=BODY | {"priority": 101})
    assert [start.priority for start in split.prefill.starts] == [start.priority for start in split.decode.starts] == [-7, 9]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    assert "[-100, 100]" in answer.json()["error"]["message"]
