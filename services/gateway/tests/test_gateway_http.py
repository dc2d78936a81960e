"""The OpenAI front over real HTTP: with the official client, and raw where a client would not let us misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from gateway_bodies import CHAT, USER
from gateway_harness import MODEL, Stack, says
from gateway_worker import TRANSFER, silence

StackOf = Callable[..., Any]

ANSWER = "the answer is forty two"


def official(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20)


@pytest.fixture
async def client(split: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with official(split) as one:
        yield one


@pytest.fixture
async def raw(split: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=split.http, timeout=20) as one:
        yield one


async def test_a_chat_answer(split: Stack, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=64)  # type: ignore[arg-type]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(split.prefill.starts[0].prompt_token_ids)
    assert answer.usage.completion_tokens == len(says(split.tokenizer, ANSWER))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    await split.settled()


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_chat(split: Stack, client: openai.AsyncOpenAI, include_usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    stream: Any = await client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=64, stream=True, **options)  # type: ignore[call-overload]
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finishes == [None] * (len(finishes) - 1) + ["stop"]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    if include_usage:
        assert chunks[-1].choices == []
        assert [usage.completion_tokens for usage in usages] == [len(says(split.tokenizer, ANSWER))]
    else:
        assert usages == []
    await split.settled()


async def test_the_raw_stream_is_server_sent_events(raw: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    answer = await raw.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"] == "mine-1"
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all("usage" in chunk for chunk in chunks)
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[-2]["choices"][0] == {"index": 0, "logprobs": None, "delta": {}, "finish_reason": "length"}


async def test_completions_by_text_and_by_token_ids(split: Stack, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="hello", temperature=0, max_tokens=64)
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == ("text_completion", ANSWER, "stop")
    ids = says(split.tokenizer, "hello", eos=False)
    same = await client.completions.create(model=MODEL, prompt=ids, temperature=0)
    assert list(split.prefill.starts[0].prompt_token_ids) == list(split.prefill.starts[1].prompt_token_ids) == ids
    assert same.choices[0].text == ANSWER
    assert split.prefill.starts[1].sampling.max_tokens == 16  # OpenAI's own default
    stream = await client.completions.create(model=MODEL, prompt=["hello"], temperature=0, max_tokens=64, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_options_reach_the_workers(split: Stack, client: openai.AsyncOpenAI) -> None:
    more = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True}
    await client.chat.completions.create(
        model=MODEL,
        messages=USER,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        max_completion_tokens=9,
        stop="zz",
        user="me",
        extra_body=more,  # type: ignore[arg-type]
    )
    sampling = split.decode.starts[0].sampling
    assert (sampling.top_k, sampling.min_tokens, sampling.max_tokens, sampling.seed) == (5, 2, 9, 2**64 - 1)
    assert sampling.temperature == pytest.approx(0.5)
    assert sampling.top_p == pytest.approx(0.9)
    assert sampling.min_p == pytest.approx(0.1)
    assert list(sampling.stop_token_ids) == [7]  # without the end of sequence: it is ignored


async def test_a_stop_string_is_never_half_streamed(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(answer="one STOX two STOP three")
    async with official(stack) as client:
        stream: Any = await client.chat.completions.create(model=MODEL, messages=USER, stop=["STOP", "never"], stream=True, max_tokens=64)  # type: ignore[call-overload]
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == "one STOX two "
    sent = ""
    for piece in pieces:
        sent += piece
        assert not sent.endswith(("S", "ST", "STO")) or "one STOX two".startswith(sent)


async def test_content_parts_are_joined(split: Stack, client: openai.AsyncOpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    await client.chat.completions.create(model=MODEL, messages=parts)
    await client.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
    assert list(split.prefill.starts[0].prompt_token_ids) == list(split.prefill.starts[1].prompt_token_ids)


async def test_models_health_and_ready(split: Stack, client: openai.AsyncOpenAI, raw: httpx.AsyncClient) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "baton"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    assert (await raw.get("/health")).json() == {"status": "ok"}
    path = {"prefill": "prefill-0", "decode": "decode-0", "transport": "sysv", "gb_per_s": 4.0}
    ready = {"ready": True, "draining": False, "routes": 1, "problems": [], "paths": [path], "rooms": 0}
    said = (await raw.get("/ready")).json()
    assert {name: servers["usable"] for name, servers in said.pop("servers").items()} == {"prefill": 1, "decode": 1, "plain": 0}
    assert said == ready
    await split.decode.kill()
    await split.ready(ready=False)
    lost = await raw.get("/ready")
    assert (lost.status_code, lost.json()["ready"], lost.json()["paths"]) == (503, False, [])
    assert "decode-0" in lost.json()["problems"][0]
    refused = await raw.post("/v1/chat/completions", json={"model": MODEL, "messages": USER})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "no_route"


async def test_lost_paths_and_methods_answer_in_the_same_shape(raw: httpx.AsyncClient) -> None:
    for method, path, status in (("GET", "/v2/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        answer = await raw.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_the_official_client_raises_its_own_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=USER, max_tokens=0)  # type: ignore[arg-type]
    assert (bad.value.param, bad.value.code, bad.value.type) == ("max_tokens", "out_of_range", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as lost:
        await client.chat.completions.create(model="other", messages=USER)  # type: ignore[arg-type]
    assert lost.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_an_honest_status(split: Stack, client: openai.AsyncOpenAI, stream: bool) -> None:
    split.script(silence, silence)
    asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=USER, stream=stream))  # type: ignore[call-overload]
    await split.prefill.next_start()
    await split.decode.next_start()
    await split.decode.kill()
    with pytest.raises(openai.InternalServerError) as caught:
        await asking
    assert caught.value.status_code == 503
    body: Any = caught.value.body
    assert (body["code"], body["origin"], body["stage"], body["type"]) == ("decode_lost", "decode", "BOOTSTRAPPING", "server_error")
    await split.prefill.wait(lambda: bool(split.prefill.aborts))
    await split.settled()


async def test_a_failure_in_mid_stream_is_an_error_event(split: Stack, client: openai.AsyncOpenAI) -> None:
    split.script(silence, silence)
    asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=USER, stream=True))  # type: ignore[call-overload]
    room = (await split.prefill.next_start()).room
    await split.decode.next_start()
    split.prefill.tokens(room, 0, [100])
    stream = await asking
    await split.decode.kill()
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "decode_lost"
    await split.settled()


async def test_a_drain_refuses_what_is_new_on_connections_that_are_old(split: Stack, raw: httpx.AsyncClient) -> None:
    assert (await raw.post("/v1/chat/completions", json=CHAT)).status_code == 200
    split.gateway.rooms.draining = True
    answer = await raw.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_draining")
    assert (await raw.get("/ready")).status_code == 503
    assert (await raw.get("/health")).status_code == 200


async def test_an_overloaded_gateway_says_when_to_come_back(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(max_rooms=1, max_queue=0)
    stack.script(silence, silence)
    async with official(stack) as client:
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=USER))  # type: ignore[arg-type]
        await stack.prefill.next_start()
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
        assert caught.value.response.headers["retry-after"] == "1"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await stack.settled()


async def test_emoji_and_cjk_arrive_whole(stack_of: StackOf) -> None:
    text = "日本語 🙂👍🏽 naïve café"
    stack: Stack = await stack_of(answer=text)
    async with official(stack) as client:
        stream: Any = await client.chat.completions.create(model=MODEL, messages=USER, stream=True, max_tokens=200)  # type: ignore[call-overload]
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 5
    assert TRANSFER.bytes
