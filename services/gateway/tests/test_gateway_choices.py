"""Several answers to one prompt: one prefill leg, a room for each answer, and what becomes of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import openai
import pytest
from gateway_bodies import USER
from gateway_harness import MODEL, Stack, ask, eventually, failure_of, greedy, rest, says
from gateway_worker import ScriptedWorker, by_the_book, silence

from baton.gateway.choices import SEED_STRIDE, seed_of
from baton.gateway.errors import OutOfRangeError
from baton.gateway.gate import Gate
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

StackOf = Callable[..., Any]

STOP = common_pb2.FINISH_REASON_STOP


def by_seed(start: worker_pb2.Start) -> list[int]:
    """Another answer to each of the seeds 7, 7 + stride, ...; the later ones are longer."""
    choice = next(index for index in range(8) if seed_of(7, index) == start.sampling.seed)
    return [100 + choice] * (3 + choice) + [2]


def several(num: int, **more: Any) -> inference_pb2.GenerateRequest:
    return ask(sampling=greedy(n=num, seed=7, **more))


def of_choices(messages: list[inference_pb2.GenerateResponse]) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {}
    for message in messages:
        if message.token_ids:
            ids.setdefault(message.choice, []).extend(message.token_ids)
    return ids


def test_the_first_seed_is_the_requests_and_no_two_are_alike() -> None:
    assert seed_of(2**64 - 1, 0) == 2**64 - 1
    assert seed_of(2**64 - 1, 1) == SEED_STRIDE - 1
    assert len({seed_of(5, choice) for choice in range(64)}) == 64


@pytest.mark.parametrize("num_plain", [0, 1])
async def test_one_prefill_leg_and_a_room_for_each_answer(stack_of: StackOf, num_plain: int) -> None:
    stack: Stack = await stack_of(plain=num_plain, answer=by_seed)
    server = stack.of("plain" if num_plain else "decode")
    reply = await stack.reply(several(3))
    assert of_choices(reply.messages) == {0: [100] * 3 + [2], 1: [101] * 4 + [2], 2: [102] * 5 + [2]}
    ends = [message for message in reply.messages if message.finish_reason]
    assert sorted(message.choice for message in ends) == [0, 1, 2]
    assert {message.finish_reason for message in ends} == {STOP}
    prompt = len(says(stack.tokenizer, "hello", eos=False))
    assert reply.last.usage == inference_pb2.Usage(prompt_tokens=prompt, completion_tokens=4 + 5 + 6)
    source, *forks = server.starts
    assert reply.last.report.room == source.room
    assert [start.fork.of_room for start in forks] == [source.room] * 2
    assert (source.forks, [start.forks for start in forks]) == (2, [0, 0])
    assert [start.sampling.seed for start in server.starts] == [7, seed_of(7, 1), seed_of(7, 2)]
    assert [start.bootstrap_timeout_ms or start.waiting_timeout_ms for start in forks] == [0, 0]
    if not num_plain:
        assert [start.room for start in stack.prefill.starts] == [source.room]
        assert not stack.prefill.starts[0].forks
    await stack.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_gets_them_by_index(stack_of: StackOf, stream: bool) -> None:
    stack: Stack = await stack_of(answer=by_seed)
    async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        asked = client.chat.completions.create(model=MODEL, messages=USER, n=3, seed=7, **options)  # type: ignore[call-overload]
        texts: dict[int, str] = {}
        if stream:
            chunks = [chunk async for chunk in await asked]
            roles = [choice.index for chunk in chunks for choice in chunk.choices if choice.delta.role]
            ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason == "stop"]
            assert sorted(roles) == sorted(ends) == [0, 1, 2]
            for chunk in chunks:
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            usage = chunks[-1].usage
        else:
            answer = await asked
            assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
            texts = {choice.index: choice.message.content for choice in answer.choices}
            usage = answer.usage
    spelt = {index: await stack.tokenizer.spell_all([100 + index] * (3 + index)) for index in range(3)}
    assert texts == spelt
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(stack.prefill.starts[0].prompt_token_ids), 15)
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_echo_and_log_probabilities_are_of_each_answer(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(answer=by_seed)
    body = {"model": MODEL, "prompt": "hello", "n": 2, "seed": 7, "logprobs": 1, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        plain = (await client.post("/v1/completions", json=body)).json()["choices"]
        echoed = (await client.post("/v1/completions", json={**body, "logprobs": None, "echo": True})).json()["choices"]
    for choice, echo in zip(plain, echoed, strict=True):
        token = 100 + choice["index"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([-token / 1000] * 3 + [-0.002 if choice["index"] == 0 else -token / 1000])
        assert choice["logprobs"]["text_offset"][0] == 0
        assert echo["text"] == "hello" + choice["text"]


@pytest.mark.parametrize("num_plain", [0, 1])
async def test_tokens_from_a_cache_are_told(stack_of: StackOf, num_plain: int) -> None:
    """By the server that computed the prompt, whatever a fork says; never more than the prompt has."""
    stack: Stack = await stack_of(plain=num_plain)

    async def cached(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        if worker.role != "decode":
            worker.event(start.room, prefill_started=worker_pb2.PrefillStarted(cached_tokens=0 if start.HasField("fork") else 2))
        await by_the_book(worker, start)

    stack.script(cached, cached)
    assert (await stack.reply(several(2))).last.usage.cached_tokens == 2
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        assert (await client.post("/v1/completions", json=body | {"prompt": [5]})).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_a_client_that_leaves_ends_all_of_them(split: Stack) -> None:
    split.script(silence, silence)
    call = split.call(several(4))
    await call.read()
    await split.decode.wait(lambda: len(split.decode.starts) == 4)
    call.cancel()
    await split.decode.wait(lambda: len(split.decode.aborts) == 4)
    assert {abort.failure.cause for abort in split.decode.aborts} == {"client_gone"}
    await split.settled()


async def test_one_whose_server_fails_goes_on_as_a_room_of_its_own(stack_of: StackOf) -> None:
    """And leaves the others where they are."""
    stack: Stack = await stack_of(prefill=1, decode=2, answer=by_seed)
    await eventually(lambda: len(stack.gateway.fleet.routes) == 2)

    async def fails_a_fork(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        if start.fork.of_room and start.sampling.seed == seed_of(7, 1):
            worker.fail(start.room, grpc.StatusCode.INTERNAL, "scripted")
        else:
            await by_the_book(worker, start)

    stack.script(by_the_book, fails_a_fork)
    reply = await stack.reply(several(3))
    assert of_choices(reply.messages) == {0: [100] * 3 + [2], 1: [101] * 4 + [2], 2: [102] * 5 + [2]}
    first, again = stack.prefill.starts
    assert (first.sampling.seed, again.sampling.seed) == (7, seed_of(7, 1))
    (alone,) = [start for worker in stack.workers if worker.role == "decode" for start in worker.starts if start.room == again.room]
    assert not alone.forks
    assert not alone.HasField("fork")
    await stack.settled()


async def test_a_prefill_server_that_is_lost_costs_none_of_them(stack_of: StackOf) -> None:
    """The source's room and its forks' go on elsewhere, each by itself."""
    stack: Stack = await stack_of(prefill=2, decode=1, answer=by_seed)
    await eventually(lambda: len(stack.gateway.fleet.routes) == 2)

    async def says_what_the_source_said(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        if start.fork.of_room or start.forks:
            await worker.wait(lambda: any(abort.room in (start.fork.of_room, start.room) for abort in worker.aborts))
            worker.fail(start.room, grpc.StatusCode.UNAVAILABLE, "prefill_lost", origin=common_pb2.ORIGIN_PREFILL)
        else:
            await by_the_book(worker, start)

    stack.script(silence, says_what_the_source_said)
    call = stack.call(several(3))
    await eventually(lambda: len(stack.decode.starts) == 3)
    lost = next(worker for worker in stack.workers if worker.role == "prefill" and worker.starts)
    stack.script(by_the_book, says_what_the_source_said)
    await lost.kill()
    messages = [message async for message in call]
    assert of_choices(messages) == {0: [100] * 3 + [2], 1: [101] * 4 + [2], 2: [102] * 5 + [2]}
    assert [one.failure.cause for one in messages[-1].report.failed_attempts] == ["prefill_lost"]
    await stack.settled()


async def test_one_that_fails_for_good_ends_the_request(split: Stack) -> None:
    async def fails_one(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        if start.sampling.seed == seed_of(7, 2):
            worker.fail(start.room, grpc.StatusCode.INVALID_ARGUMENT, "scripted")

    split.script(silence, fails_one)
    code, failure = await failure_of(split.call(several(4)))
    assert (code, failure.cause, failure.origin) == (grpc.StatusCode.INVALID_ARGUMENT, "scripted", common_pb2.ORIGIN_DECODE)
    await split.decode.wait(lambda: len(split.decode.aborts) == 3)
    assert {(abort.failure.cause, abort.failure.origin) for abort in split.decode.aborts} == {("other_answer_failed", common_pb2.ORIGIN_GATEWAY)}
    await split.settled()


async def test_a_stop_string_in_the_first_token_does_not_take_the_prompt_from_the_others(split: Stack) -> None:
    """Prefill's token ends the first answer before the KV cache is at decode: the source's legs are ended when it has landed."""
    split.script(silence, silence)
    call = split.call(several(2, stop=["the"]))
    source = await split.prefill.next_start()
    await split.decode.wait(lambda: len(split.decode.starts) == 2)
    fork = split.decode.starts[1]
    split.prefill.tokens(source.room, 0, says(split.tokenizer, "the", eos=False)[:1])
    split.prefill.tokens(source.room, 1, says(split.tokenizer, "the", eos=False)[1:])
    messages: list[inference_pb2.GenerateResponse] = []
    while not any(message.finish_reason == STOP and message.choice == 0 for message in messages):
        messages.append(await call.read())
    other = split.call()  # its starts would come behind aborts
    await split.prefill.next_start(2)
    await split.decode.wait(lambda: len(split.decode.starts) == 3)
    assert not split.prefill.aborts
    assert not split.decode.aborts
    other.cancel()
    await split.prefill.wait(lambda: len(split.prefill.aborts) == 1)
    await split.decode.wait(lambda: len(split.decode.aborts) == 1)
    split.decode.event(source.room, kv_ready=worker_pb2.KvReady())
    await split.prefill.wait(lambda: [abort.room for abort in split.prefill.aborts[1:]] == [source.room])
    await split.decode.wait(lambda: [abort.room for abort in split.decode.aborts[1:]] == [source.room])
    split.decode.event(fork.room, prefill_started=worker_pb2.PrefillStarted())
    split.decode.tokens(fork.room, 0, [101, 2])
    split.decode.event(fork.room, finished=worker_pb2.Finished(reason=STOP, completion_tokens=2))
    messages += await rest(call)
    assert of_choices(messages)[1] == [101, 2]
    await split.settled()


async def test_a_client_that_leaves_meanwhile_ends_the_source_too(split: Stack) -> None:
    split.script(silence, silence)
    call = split.call(several(2, stop=["t"]))
    source = await split.prefill.next_start()
    await split.decode.wait(lambda: len(split.decode.starts) == 2)
    split.prefill.tokens(source.room, 0, says(split.tokenizer, "t", eos=False))
    while (await call.read()).finish_reason != STOP:
        pass
    call.cancel()
    await split.decode.wait(lambda: len(split.decode.aborts) == 2)
    await split.settled()


async def test_servers_of_an_older_version_are_asked_for_one_answer_only(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(worker={"decode": {"takes_forks": False}})
    code, failure = await failure_of(stack.call(several(2)))
    assert (code, failure.cause) == (grpc.StatusCode.INVALID_ARGUMENT, "unsupported")
    assert "sampling.n=2" in failure.message
    assert (await stack.reply(ask(sampling=greedy(n=1)))).text


async def test_they_are_let_in_together_or_not_at_all(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(max_rooms=3)
    code, failure = await failure_of(stack.call(several(4)))
    assert (code, failure.cause) == (grpc.StatusCode.INVALID_ARGUMENT, OutOfRangeError.cause)
    assert "[1, 3]" in failure.message
    stack.script(silence, silence)
    first = stack.call(several(2))
    await first.read()
    second = asyncio.create_task(stack.reply(several(2)))
    gate: Gate = stack.gateway.gate
    await eventually(lambda: gate.num_waiting == 1)
    third = asyncio.create_task(stack.reply(ask()))
    await eventually(lambda: gate.num_waiting == 2)  # one place is free, and whoever waits for two is not overtaken
    stack.script(by_the_book, by_the_book)
    first.cancel()
    assert len(of_choices((await second).messages)) == 2
    assert (await third).text
    await stack.settled()
    assert gate._num_entering == 0
