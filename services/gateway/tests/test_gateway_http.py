"""The OpenAI front over real HTTP: with the official client, and raw where a client would not let us misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from gateway_harness import MODEL, Stack, eventually, says
from gateway_worker import TRANSFER, silence

from baton.gateway.http.server import HttpServer
from baton.wire.v1 import common_pb2, worker_pb2

StackOf = Callable[..., Any]

ANSWER = "the answer is forty two"
USER = [{"role": "user", "content": "hello"}]


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


CHAT = {"model": MODEL, "messages": USER}

SURROGATE: tuple[str, list[str]] = ("invalid_request", ["has the lone surrogate \\ud800: it is not Unicode text"])

REFUSALS: list[tuple[str, Any, int, str | None, str, list[str]]] = [
    ("chat/completions", b'{"model": ', 400, None, "malformed_body", ["not JSON", "line 1, column 11"]),
    ("chat/completions", b"[1, 2]", 400, None, "malformed_body", ["JSON array", "must be an object"]),
    ("chat/completions", b'{"model": "\xff\xfe"}', 400, None, "body_not_utf8", ["not UTF-8", "byte 11 is 0xff"]),
    ("chat/completions", b'{"temperature": NaN}', 400, None, "malformed_body", ["NaN"]),
    ("chat/completions", b"[" * 60_000, 400, None, "malformed_body", ["nested too deeply"]),
    ("chat/completions", b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}", 400, None, "malformed_body", ["4300 digits: shorten it"]),
    ("chat/completions", CHAT | {"temperature": 10**400}, 400, "temperature", "wrong_type", ["64 bits"]),
    ("chat/completions", {"messages": USER}, 400, "model", "missing_field", ["model is missing"]),
    ("chat/completions", CHAT | {"model": "other"}, 404, "model", "model_not_found", ["'other'", "'tiny'"]),
    ("chat/completions", {"model": MODEL}, 400, "messages", "missing_field", ["messages is missing"]),
    ("chat/completions", CHAT | {"messages": []}, 400, "messages", "missing_field", ["messages is empty"]),
    ("chat/completions", CHAT | {"messages": ["hi"]}, 400, "messages[0]", "wrong_type", ["must be an object"]),
    ("chat/completions", CHAT | {"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role", "wrong_type", ['"robot"', "assistant"]),
    ("chat/completions", CHAT | {"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing_field", ["missing"]),
    (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages[0].content[0].type",
        "unsupported",
        ["reads text only"],
    ),
    ("chat/completions", CHAT | {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages", "chat_template", ["no tools here"]),
    ("chat/completions", CHAT | {"messages": [USER[0], {"role": "user", "content": "\ud800"}]}, 400, "messages[1].content", *SURROGATE),
    ("completions", {"model": MODEL, "prompt": ["a\udbffb"]}, 400, "prompt[0]", "invalid_request", ["lone surrogate \\udbff: "]),
    ("chat/completions", CHAT | {"\ud800": 1}, 400, "\\ud800", *SURROGATE),
    ("chat/completions", CHAT | {"model": "\ud800"}, 400, "model", *SURROGATE),
    ("chat/completions", CHAT | {"stop": "\ud800"}, 400, "stop", *SURROGATE),
    ("chat/completions", CHAT | {"stop": ["a", "\ud800"]}, 400, "stop[1]", *SURROGATE),
    ("chat/completions", CHAT | {"user": "\ud800"}, 400, "user", *SURROGATE),
    ("chat/completions", CHAT | {"metadata": {"x": "\ud800"}}, 400, "metadata.x", *SURROGATE),
    ("chat/completions", CHAT | {"n": 0}, 400, "n", "unsupported", ["n=0 ", "must be 1"]),
    ("completions", {"model": MODEL, "prompt": "x", "best_of": 2}, 400, "best_of", "unsupported", ["best_of=2 ", "must be 1"]),
    ("chat/completions", CHAT | {"seed": 2**64}, 400, "seed", "out_of_range", ["[-9223372036854775808, 18446744073709551615]"]),
    ("chat/completions", CHAT | {"seed": -(2**63) - 1}, 400, "seed", "out_of_range", ["[-9223372036854775808, 18446744073709551615]"]),
    ("chat/completions", CHAT | {"top_p": 1e-300}, 400, "top_p", "out_of_range", ["top_p=1e-300 is outside (0, 1]", "32-bit"]),
    (
        "chat/completions",
        CHAT | {"max_tokens": 0},
        400,
        "max_tokens",
        "out_of_range",
        ["max_tokens=0 is outside [1, 511]: "],
    ),
    ("chat/completions", CHAT | {"max_completion_tokens": -1}, 400, "max_completion_tokens", "out_of_range", ["max_completion_tokens=-1 "]),
    ("chat/completions", CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens", "invalid_request", ["=1 ", "=2 "]),
    ("chat/completions", CHAT | {"max_tokens": 100_000}, 400, "max_tokens", "out_of_range", ["=100000 ", "of 512 tokens"]),
    ("chat/completions", CHAT | {"max_tokens": "5"}, 400, "max_tokens", "wrong_type", ['max_tokens="5" must be an integer']),
    ("chat/completions", CHAT | {"max_tokens": True}, 400, "max_tokens", "wrong_type", ["true must be an integer"]),
    ("chat/completions", CHAT | {"temperature": 3}, 400, "temperature", "out_of_range", ["[0, 2]"]),
    ("chat/completions", CHAT | {"stream": "yes"}, 400, "stream", "wrong_type", ["true or false"]),
    ("chat/completions", CHAT | {"stop": ["x"] * 17}, 400, "stop", "stop_list", ["17 strings", "16"]),
    ("chat/completions", CHAT | {"stop": ["y" * 257]}, 400, "stop[0]", "stop_list", ["257 characters", "256"]),
    ("chat/completions", CHAT | {"stop": [1]}, 400, "stop", "wrong_type", ["array of strings"]),
    ("chat/completions", CHAT | {"n": 2}, 400, "n", "unsupported", ["n=2"]),
    ("chat/completions", CHAT | {"logprobs": 1}, 400, "logprobs", "wrong_type", ["logprobs=1 must be true or false"]),
    ("chat/completions", CHAT | {"top_logprobs": 3}, 400, "top_logprobs", "invalid_request", ["top_logprobs=3 is for logprobs=true only"]),
    ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "out_of_range", ["=21 ", "[0, 20]"]),
    ("chat/completions", CHAT | {"presence_penalty": 2.5}, 400, "presence_penalty", "out_of_range", ["=2.5 ", "[-2, 2]"]),
    ("chat/completions", CHAT | {"frequency_penalty": -3}, 400, "frequency_penalty", "out_of_range", ["=-3.0 ", "[-2, 2]"]),
    ("chat/completions", CHAT | {"repetition_penalty": 0}, 400, "repetition_penalty", "out_of_range", ["=0.0 ", "[0.01, 10]"]),
    ("chat/completions", CHAT | {"logit_bias": {"5": 101}}, 400, "logit_bias[5]", "out_of_range", ["=101.0 ", "[-100, 100]"]),
    ("chat/completions", CHAT | {"logit_bias": {"99999": 1}}, 400, "logit_bias[99999]", "out_of_range", ["=99999 ", "vocabulary"]),
    ("chat/completions", CHAT | {"logit_bias": {"x": 1}}, 400, 'logit_bias."x"', "wrong_type", ["token id in decimal digits"]),
    ("chat/completions", CHAT | {"logit_bias": {"5": "1"}}, 400, 'logit_bias."5"', "wrong_type", ['="1"', "the value a number"]),
    ("chat/completions", CHAT | {"logit_bias": {str(n): 1 for n in range(301)}}, 400, "logit_bias", "out_of_range", ["301 tokens", "300"]),
    ("chat/completions", CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported", ["json_object"]),
    ("chat/completions", CHAT | {"temprature": 1}, 400, "temprature", "unsupported", ["not a field"]),
    ("chat/completions", CHAT | {"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_request", ["stream=true only"]),
    ("chat/completions", CHAT | {"request_id": "caf\u00e9"}, 400, "request_id", "invalid_request", ["printable ASCII"]),
    ("completions", {"model": MODEL, "prompt": ""}, 400, "prompt", "prompt_empty", ["prompt is empty"]),
    ("completions", {"model": MODEL, "prompt": []}, 400, "prompt", "prompt_empty", ["prompt is empty"]),
    ("completions", {"model": MODEL}, 400, "prompt", "missing_field", ["prompt is missing"]),
    ("completions", {"model": MODEL, "prompt": ["a", "b"]}, 400, "prompt", "unsupported", ["2 prompts", "limit is 1"]),
    ("completions", {"model": MODEL, "prompt": [1, "a"]}, 400, "prompt", "wrong_type", ["array of token ids"]),
    ("completions", {"model": MODEL, "prompt": [1, 99_999]}, 400, "prompt[1]", "out_of_range", ["=99999 "]),
    ("completions", {"model": MODEL, "prompt": [-1]}, 400, "prompt[0]", "out_of_range", ["=-1 "]),
    ("completions", {"model": MODEL, "prompt": "x" * 600}, 400, "prompt", "prompt_too_long", ["600 tokens", "511"]),
    ("completions", {"model": MODEL, "prompt": "x", "echo": True, "logprobs": 1}, 400, "echo", "invalid_request", ["echo=true with logprobs"]),
    ("completions", {"model": MODEL, "prompt": "x", "logprobs": 21}, 400, "logprobs", "out_of_range", ["logprobs=21 "]),
    ("completions", b"x" * 70_000, 413, None, "body_too_large", ["70000 bytes", "65536"]),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_callers_mistake_is_an_openai_error_that_names_field_value_and_limit(stack_of: StackOf, stream: bool) -> None:
    stack: Stack = await stack_of(max_body_bytes=65_536)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as raw:
        for path, body, status, param, code, parts in REFUSALS:
            if isinstance(body, dict) and stream and "stream_options" not in body:
                body = {"stream": True} | body
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await raw.post(f"/v1/{path}", content=content)
            error = answer.json()["error"]
            case = (path, str(body)[:80], error)
            assert answer.status_code == status, case
            assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error"), case
            for part in parts:
                assert part in error["message"], case
            assert len(error["message"]) < 400, case
    assert stack.prefill.starts == []
    assert stack.decode.starts == []
    await stack.settled()


async def test_an_error_is_short_however_long_what_it_names(stack_of: StackOf) -> None:
    stack: Stack = await stack_of()
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as raw:
        for change in ({"model": "m" * 200_000}, {"f" * 200_000: 1}, {"seed": int("9" * 4000)}):
            answer = await raw.post("/v1/chat/completions", content=json.dumps(CHAT | change))
            assert answer.status_code in (400, 404)
            assert len(answer.content) < 3000
            # its end is there: the limit, or what to do
            assert answer.json()["error"]["message"].endswith(("'tiny'", "leave it out", "18446744073709551615]"))
    await stack.settled()


async def test_a_body_without_a_length_is_bounded_too(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(max_body_bytes=65_536)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as raw:
        answer = await raw.post("/v1/completions", content=endless())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_first_token", [False, True])
async def test_a_client_that_leaves_ends_both_legs(split: Stack, stream: bool, after_first_token: bool) -> None:
    """Also when nothing is being sent to it: it is not the next write that finds out."""
    split.script(silence, silence)
    reader, writer = await asyncio.open_connection(*split.http.removeprefix("http://").split(":"))
    body = json.dumps(CHAT | {"stream": stream}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    room = (await split.prefill.next_start()).room
    await split.decode.next_start()
    if after_first_token:
        split.prefill.tokens(room, 0, [100])
        if stream:
            assert b"200 OK" in await reader.readline()
    writer.close()
    await split.decode.wait(lambda: bool(split.decode.aborts), timeout_s=2)
    await split.prefill.wait(lambda: bool(split.prefill.aborts), timeout_s=2)
    assert {abort.failure.origin for abort in (split.decode.aborts[0], split.prefill.aborts[0])} == {common_pb2.ORIGIN_CLIENT}
    await split.settled()


async def test_a_client_that_does_not_read_is_ended_within_a_bound(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.inference.LAST_WORDS_S", 0.2)
    monkeypatch.setattr("baton.gateway.http.responses.LAST_WORDS_S", 0.2)
    big = {role: {"max_model_len": 400_000, "total_pages": 40_000} for role in ("prefill", "decode")}
    stack: Stack = await stack_of(answer=lambda start: [100] * 200_000, max_buffered_tokens=2_000, worker=big)

    async def trickle(worker: Any, start: worker_pb2.Start) -> None:
        """A token a report, so that each makes an event of its own and what the sockets hold is filled."""
        worker.event(start.room, kv_ready=worker_pb2.KvReady())
        for index in range(1, 200_000):
            worker.tokens(start.room, index, [100])
            if index % 50 == 0:
                await asyncio.sleep(0.002)
            if worker.aborts:
                return

    stack.script(None, trickle)
    host, port = stack.http.removeprefix("http://").split(":")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((host, int(port)))
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 200_000}).encode()
    deaf.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await stack.decode.wait(lambda: bool(stack.decode.aborts), timeout_s=60)
    assert stack.decode.aborts[0].failure.cause == "slow_reader"
    await stack.settled()
    # its handler lets go, though the client never reads
    await eventually(lambda: not any("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks()), 5.0)
    deaf.close()


async def test_a_complete_answer_that_nobody_reads_is_let_go_at_the_deadline(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.inference.LAST_WORDS_S", 0.2)
    monkeypatch.setattr("baton.gateway.http.responses.LAST_WORDS_S", 0.2)
    bind = HttpServer._bind

    def bind_small(server: HttpServer) -> socket.socket:
        listening = bind(server)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what is accepted inherits it
        return listening

    monkeypatch.setattr(HttpServer, "_bind", bind_small)
    big = {role: {"max_model_len": 400_000, "total_pages": 40_000} for role in ("prefill", "decode")}
    stack: Stack = await stack_of(request_timeout_s=4.0, max_buffered_tokens=100_000, worker=big)

    async def all_of_it(worker: Any, start: worker_pb2.Start) -> None:
        worker.event(start.room, kv_ready=worker_pb2.KvReady())
        for index in range(1, 3_000):  # a token a report: an event of its own
            worker.tokens(start.room, index, [100])
            if index % 100 == 0:
                await asyncio.sleep(0)
        worker.event(start.room, finished=worker_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=3_000))

    stack.script(None, all_of_it)
    host, port = stack.http.removeprefix("http://").split(":")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((host, int(port)))
    body = json.dumps(CHAT | {"stream": True, "request_id": "r" * 128, "max_tokens": 3_000}).encode()
    deaf.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def handled() -> bool:
        return any("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks())

    await stack.decode.next_start()
    await eventually(lambda: len(stack.gateway.rooms) == 0, 4.0)
    assert handled(), "the client read it after all"
    await eventually(lambda: not handled(), 6.0)
    assert not stack.decode.aborts, "the room had ended well"
    deaf.close()


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
