"""Policy "recompute": a server dies at any token, or its transfer fails, and the client's stream goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, failure_of, greedy, rest, says, serving
from gateway_worker import ScriptedWorker, by_the_book, silence

from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

StackOf = Callable[..., Any]

ANSWER = "the answer is forty two"


async def two_by_two(stack_of: StackOf, **settings: Any) -> Stack:
    """Silent servers: each test says what they say."""
    stack: Stack = await stack_of(**({"prefill": 2, "decode": 2, "kv_load_failure_policy": "recompute"} | settings))
    whole = sum(worker.role == "prefill" for worker in stack.workers) * sum(worker.role == "decode" for worker in stack.workers)
    await eventually(lambda: len(stack.gateway.fleet.routes) == whole)
    stack.script(silence, silence)
    return stack


class Stream:
    """A request whose answer is being made by hand."""

    def __init__(self, stack: Stack, request: inference_pb2.GenerateRequest | None = None) -> None:
        self.stack = stack
        self.answer = says(stack.tokenizer, ANSWER)
        self.call = stack.call(request)
        self.got: list[inference_pb2.GenerateResponse] = []
        self.prefill: ScriptedWorker
        self.decode: ScriptedWorker
        self.first: worker_pb2.Start

    async def begin(self) -> Stream:
        await self.call.read()
        self.prefill, self.decode = [await serving(self.stack, role) for role in ("prefill", "decode")]
        self.first = self.decode.starts[0]
        return self

    async def read(self) -> None:
        message = await self.call.read()
        assert isinstance(message, inference_pb2.GenerateResponse)
        self.got.append(message)

    async def speak(self, num_tokens: int) -> None:
        """Prefill says the first token, decode the others, and the client has them all."""
        self.prefill.event(self.first.room, bootstrapped=worker_pb2.Bootstrapped())
        self.prefill.event(self.first.room, transfer_started=worker_pb2.TransferStarted())
        self.prefill.tokens(self.first.room, 0, self.answer[:1])
        self.prefill.event(self.first.room, transferred=worker_pb2.Transferred())
        self.decode.event(self.first.room, kv_ready=worker_pb2.KvReady(digest_checked=True))
        self.decode.tokens(self.first.room, 1, self.answer[1:num_tokens])
        while len(self.ids) < num_tokens:
            await self.read()

    async def rest(self) -> inference_pb2.GenerateResponse:
        """The last message."""
        self.got += await rest(self.call)
        return self.got[-1]

    @property
    def ids(self) -> list[int]:
        return [token for message in self.got for token in message.token_ids]

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.got)

    def later_starts(self) -> dict[str, worker_pb2.Start]:
        """By instance: what servers were told after the first room."""
        return {worker.instance_id: start for worker in self.stack.workers for start in worker.starts if start.room != self.first.room}


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
async def test_decode_lost_at_any_token_is_not_noticed(stack_of: StackOf, num_tokens: int) -> None:
    stack = await two_by_two(stack_of)
    stream = await Stream(stack, ask(sampling=greedy(temperature=1.0, min_tokens=3))).begin()
    await stream.speak(num_tokens)
    stack.script(by_the_book, by_the_book)
    await stream.decode.kill()
    last = await stream.rest()
    assert stream.ids == stream.answer
    assert stream.text == ANSWER
    assert last.usage == inference_pb2.Usage(prompt_tokens=len(stream.first.prompt_token_ids), completion_tokens=len(stream.answer))
    for start in stream.later_starts().values():
        assert list(start.prompt_token_ids) == [*stream.first.prompt_token_ids, *stream.answer[:num_tokens]]
        sampling = worker_pb2.Sampling()
        sampling.CopyFrom(stream.first.sampling)
        sampling.max_tokens -= num_tokens
        sampling.min_tokens = max(0, 3 - num_tokens)
        sampling.answered_tokens = num_tokens
        assert start.sampling == sampling
        assert start.deadline_ms <= stream.first.deadline_ms
    (failed,) = last.report.failed_attempts
    assert (failed.room, failed.tokens_sent, failed.failure.cause) == (stream.first.room, num_tokens, "decode_lost")
    assert last.report.recomputed_tokens == len(stream.first.prompt_token_ids) + num_tokens
    assert not last.report.prefilled_on_decode  # there was another pair
    assert 0 < last.report.ttft_ms < last.report.total_ms
    rooms = stack.gateway.rooms
    assert rooms.counters["streams_continued"] == 1
    assert rooms.counters["recomputed_tokens"] == last.report.recomputed_tokens
    await stack.settled()


async def test_without_it_the_client_is_told(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of, kv_load_failure_policy="fail")
    stream = await Stream(stack).begin()
    await stream.speak(3)
    await stream.decode.kill()
    code, failure = await failure_of(stream.call)
    assert (code, failure.cause) == (grpc.StatusCode.UNAVAILABLE, "decode_lost")
    assert failure.elapsed_ms > 0
    assert failure.allowed_ms == pytest.approx(20_000, abs=100)  # what the request itself was allowed
    assert not stream.later_starts()
    await stack.settled()


async def test_a_plain_server_lost_in_mid_stream_too(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(plain=2, kv_load_failure_policy="recompute")
    await eventually(lambda: len(stack.gateway.fleet.routes) == 2)
    stack.script(None, silence)
    answer = says(stack.tokenizer, ANSWER)
    call = stack.call()
    await call.read()
    server = await serving(stack, "plain")
    server.tokens(server.starts[0].room, 0, answer[:3])
    got = await call.read()
    stack.script()
    await server.kill()
    messages = [got, *await rest(call)]
    assert [token for message in messages for token in message.token_ids] == answer
    assert messages[-1].report.failed_attempts[0].tokens_sent == 3
    await stack.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http_too(stack_of: StackOf, stream: bool) -> None:
    """A stop string that lies half before the break and half behind it: what was held back of it is not lost, and not sent."""
    stack = await two_by_two(stack_of)
    answer = says(stack.tokenizer, ANSWER)
    body = {"model": MODEL, "prompt": "x", "stream": stream, "stop": ["forty two"], "stream_options": {"include_usage": True} if stream else None}
    cut = next(count for count in range(1, len(answer)) if stack.tokenizer.decode(answer[:count]).endswith("fort"))
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        task = asyncio.create_task(client.post("/v1/completions", json={name: value for name, value in body.items() if value is not None}))
        prefill, decode = [await serving(stack, role) for role in ("prefill", "decode")]
        room = decode.starts[0].room
        prefill.tokens(room, 0, answer[:1])
        decode.tokens(room, 1, answer[1:cut])
        await eventually(lambda: stack.gateway.rooms._rooms[room].passage.num_tokens == cut)
        stack.script(by_the_book, by_the_book)
        await decode.kill()
        response = await task
    assert response.status_code == 200
    if stream:
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        finish, usage = next(event["choices"][0]["finish_reason"] for event in reversed(events) if event["choices"]), events[-1]["usage"]
    else:
        text, finish, usage = response.json()["choices"][0]["text"], response.json()["choices"][0]["finish_reason"], response.json()["usage"]
    assert (text, finish) == ("the answer is ", "stop")
    assert usage["completion_tokens"] == len(answer) - 1
    await stack.settled()


@pytest.mark.parametrize(
    ("code", "origin", "cause"),
    [
        (grpc.StatusCode.DATA_LOSS, common_pb2.ORIGIN_TRANSFER, "digest_mismatch"),
        (grpc.StatusCode.UNAVAILABLE, common_pb2.ORIGIN_PREFILL, "prefill_lost"),
        (grpc.StatusCode.ABORTED, common_pb2.ORIGIN_PREFILL, "declined"),
    ],
)
async def test_where_only_the_transfer_failed_decode_computes_the_prompt(
    stack_of: StackOf, code: grpc.StatusCode, origin: common_pb2.Origin.ValueType, cause: str
) -> None:
    stack = await two_by_two(stack_of)
    stream = await Stream(stack).begin()
    stream.prefill.event(stream.first.room, transfer_started=worker_pb2.TransferStarted())
    stream.prefill.tokens(stream.first.room, 0, stream.answer[:1])
    await stream.read()
    stack.script(by_the_book, by_the_book)
    stream.decode.fail(stream.first.room, code, cause, origin=origin)
    last = await stream.rest()
    assert stream.ids == stream.answer
    assert last.report.prefilled_on_decode
    assert (last.report.prefill_instance, last.report.decode_instance) == (stream.decode.instance_id, stream.decode.instance_id)
    (instance, start), *others = stream.later_starts().items()
    assert not others
    assert instance == stream.decode.instance_id
    assert start.HasField("local")
    assert last.report.failed_attempts[0].failure.cause == cause
    assert not last.report.failed_attempts[0].prefilled_on_decode
    assert stack.gateway.rooms.counters["prefilled_on_decode"] == 1
    assert stack.gateway.rooms.counters["recomputed_tokens"] == len(start.prompt_token_ids) == last.report.recomputed_tokens
    await stack.settled()


async def test_two_servers_that_lose_each_other_cost_the_client_nothing(stack_of: StackOf) -> None:
    """The network between them is cut: prefill says that decode is gone. But the gateway still hears decode, which does the rest alone."""
    stack = await two_by_two(stack_of, prefill=1, decode=1)
    stream = await Stream(stack).begin()
    stream.prefill.event(stream.first.room, transfer_started=worker_pb2.TransferStarted())
    await eventually(lambda: stack.gateway.rooms._rooms[stream.first.room].machine.state.name == "TRANSFERRING")
    stack.script(by_the_book, by_the_book)
    stream.prefill.fail(stream.first.room, grpc.StatusCode.UNAVAILABLE, "decode_lost", origin=common_pb2.ORIGIN_DECODE)
    last = await stream.rest()
    assert stream.ids == stream.answer
    assert last.report.prefilled_on_decode
    assert not any(worker.breaker._num_failures for worker in stack.gateway.fleet.workers)
    await stack.settled()


async def test_a_transfer_that_takes_too_long_is_given_up_for_decodes_own_work(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of, transfer_timeout_s=0.3)
    stream = await Stream(stack).begin()
    stream.prefill.event(stream.first.room, transfer_started=worker_pb2.TransferStarted())
    await eventually(lambda: stack.gateway.rooms._rooms[stream.first.room].machine.state.name == "TRANSFERRING")
    stack.script(by_the_book, by_the_book)
    last = await stream.rest()
    assert stream.ids == stream.answer
    assert last.report.prefilled_on_decode
    assert last.report.failed_attempts[0].failure.cause == "transfer_timeout"
    assert [abort.room for abort in stream.decode.aborts] == [stream.first.room]
    await stack.settled()


async def test_with_no_prefill_server_left_a_decode_server_does_it_alone(stack_of: StackOf) -> None:
    """Rather than to fail, and only there: prompts that could go to a prefill server do."""
    stack = await two_by_two(stack_of, prefill=1)
    stream = await Stream(stack).begin()
    stack.script(by_the_book, by_the_book)
    await stream.prefill.kill()
    last = await stream.rest()
    assert stream.ids == stream.answer
    assert last.report.prefilled_on_decode
    await stack.settled()


async def test_two_deaths_are_two_attempts_and_a_third_is_one_too_many(stack_of: StackOf) -> None:
    for retries in (1, 2):
        stack = await two_by_two(stack_of, decode=3, retries=retries)
        stream = await Stream(stack).begin()
        await stream.speak(2)
        await stream.decode.kill()
        await eventually(lambda stream=stream: len(stream.later_starts()) == 2)  # type: ignore[misc]
        (second,) = [worker for worker in stack.workers if worker.role == "decode" and worker.instance_id in stream.later_starts()]
        start = stream.later_starts()[second.instance_id]
        second.tokens(start.room, 0, stream.answer[2:3])  # decode may be ahead of prefill, or do its work twice: the same token
        while len(stream.ids) < 3:
            await stream.read()
        stack.script(by_the_book, by_the_book)
        await second.kill()
        if retries == 1:
            _, failure = await failure_of(stream.call)
            assert failure.cause == "decode_lost"
            assert "attempt 2 of at most 2" in failure.message
        else:
            last = await stream.rest()
            assert stream.ids == stream.answer
            assert [one.tokens_sent for one in last.report.failed_attempts] == [2, 3]
        await stack.settled()


async def test_an_answer_whose_end_was_not_said_any_more_is_complete(stack_of: StackOf) -> None:
    """Its server died between the last token and the word that this was it: nothing is left to be computed."""
    for policy in ("fail", "recompute"):
        stack = await two_by_two(stack_of, kv_load_failure_policy=policy)
        stream = await Stream(stack).begin()
        await stream.speak(len(stream.answer))
        await stream.decode.kill()
        last = await stream.rest()
        assert last.finish_reason == common_pb2.FINISH_REASON_STOP
        assert stream.text == ANSWER
        assert not last.report.failed_attempts
        assert not stream.later_starts()
        await stack.settled()


async def test_servers_with_other_weights_do_not_go_on_with_it(stack_of: StackOf) -> None:
    """Before the first token they may answer it whole; behind another model's tokens they would answer something else."""
    other = {"fingerprint": {"weights": "other"}}
    stack: Stack = await stack_of(plain=2, kv_load_failure_policy="recompute")
    odd = stack.of("plain", 1)
    odd.fingerprint = other["fingerprint"]
    await odd.kill()
    await odd.start()
    await eventually(lambda: len(stack.gateway.fleet.routes) == 2 and any(w.info.fingerprint.weights == "other" for w in stack.gateway.fleet.workers))
    stack.script(None, silence)
    answer = says(stack.tokenizer, ANSWER)
    call = stack.call()
    await call.read()
    server = await serving(stack, "plain")
    server.tokens(server.starts[0].room, 0, answer[:2])
    await call.read()
    stack.script()
    await server.kill()
    code, failure = await failure_of(call)
    assert (code, failure.cause) == (grpc.StatusCode.UNAVAILABLE, "plain_lost")
    await stack.settled()


async def test_a_frozen_server_is_left_in_mid_stream(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of, silence_limit_s=0.6)
    stream = await Stream(stack).begin()
    await stream.speak(3)
    stack.script(by_the_book, by_the_book)
    stream.decode.freeze()
    last = await stream.rest()
    assert stream.ids == stream.answer
    assert [one.failure.cause for one in last.report.failed_attempts] == ["decode_silent"]
    stream.decode.thaw()
    await stack.settled()


async def test_the_deadline_is_the_first_ones(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of, request_timeout_s=1.0)
    stream = await Stream(stack).begin()
    await stream.speak(2)
    await stream.decode.kill()
    code, failure = await failure_of(stream.call)
    assert (code, failure.cause, failure.allowed_ms) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline", 1000)
    assert stream.later_starts()
    await stack.settled()


async def test_overload_of_prefill_is_no_work_for_decode(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of, prefill=1, decode=1)
    stream = await Stream(stack).begin()
    stream.prefill.fail(stream.first.room, grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_rooms")
    code, failure = await failure_of(stream.call)
    assert (code, failure.cause) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_rooms")
    assert not stream.later_starts()
    await stack.settled()


async def test_a_frozen_server_is_left_as_soon_as_there_is_somewhere_to_go(stack_of: StackOf) -> None:
    """Both decode servers stand still at first; the other one comes back."""
    stack = await two_by_two(stack_of, prefill=1, silence_limit_s=0.5)
    stream = await Stream(stack).begin()
    await stream.speak(2)
    (other,) = [worker for worker in stack.workers if worker.role == "decode" and worker is not stream.decode]
    for number, worker in enumerate((other, stream.decode), start=1):  # never a moment in which the stream could go to the other one
        worker.freeze()
        await eventually(lambda number=number: sum(worker.silent for worker in stack.gateway.fleet.workers) == number)
    assert stack.gateway.rooms._rooms[stream.first.room].failure is None
    stack.script(by_the_book, by_the_book)
    other.thaw()
    last = await stream.rest()
    assert stream.ids == stream.answer
    assert last.report.decode_instance == other.instance_id
    stream.decode.thaw()
    await stack.settled()
