"""Several prompts in one completion, and prompts that are scored and not answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import openai
import pytest
from gateway_harness import MODEL, Stack, eventually
from gateway_worker import ScriptedWorker, silence

from baton.gateway.choices import seed_of
from baton.gateway.dispatch import Dispatcher
from baton.gateway.errors import OverloadedError
from baton.gateway.sampling import MAX_ANSWERS
from baton.wire.v1 import worker_pb2

StackOf = Callable[..., Any]

PROMPTS = ["a", "bb", "ccc"]
#: The first token that answers are made of, and the one that ends them.
A, END = 100, 2


def of_prompt(start: worker_pb2.Start) -> list[int]:
    """As many tokens as the prompt has, and others for a second answer."""
    second = start.sampling.seed == seed_of(7, 1)
    return [A + len(start.prompt_token_ids) + 10 * second] * len(start.prompt_token_ids) + [END]


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPTS, "seed": 7, "max_tokens": 8} | more


@pytest.fixture
async def stack(stack_of: StackOf) -> Stack:
    made: Stack = await stack_of(answer=of_prompt)
    return made


async def completion(stack: Stack, **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        answer = await client.post("/v1/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def alike(choice: dict[str, Any], alone: dict[str, Any]) -> bool:
    return {name: value for name, value in choice.items() if name != "index"} == {name: value for name, value in alone.items() if name != "index"}


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"echo": True, "n": 2}, {"echo": True, "logprobs": 2}, {"prompt_logprobs": 1, "n": 2}])
async def test_each_prompt_is_answered_as_if_it_had_come_alone(stack: Stack, fields: dict[str, Any]) -> None:
    alone = [await completion(stack, prompt=prompt, **fields) for prompt in PROMPTS]
    whole = await completion(stack, **fields)
    assert [choice["index"] for choice in whole["choices"]] == list(range(3 * fields.get("n", 1)))
    of_alone = [choice for one in alone for choice in one["choices"]]
    assert all(map(alike, whole["choices"], of_alone))
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(one["usage"][name] for one in alone)
    ids = [list(start.prompt_token_ids) for start in stack.prefill.starts[-3:]]
    as_tokens = await completion(stack, prompt=ids, **fields)
    assert all(map(alike, as_tokens["choices"], whole["choices"]))
    assert [list(start.prompt_token_ids) for start in stack.prefill.starts[-3:]] == ids
    assert [start.forks for start in stack.decode.starts if not start.HasField("fork")][-3:] == [fields.get("n", 1) - 1] * 3
    await stack.settled()


async def test_streamed_by_the_official_client(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        asked: Any = body(n=2, echo=True, logprobs=1)
        whole = await client.completions.create(**asked)
        chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    texts: dict[int, str] = {}
    logprobs: dict[int, list[float | None]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs if choice.logprobs else [])  # type: ignore[arg-type]
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert logprobs == {choice.index: choice.logprobs.token_logprobs for choice in whole.choices if choice.logprobs}
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == list(range(6))
    assert chunks[-1].usage == whole.usage
    await stack.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all(stack: Stack, stream: bool) -> None:
    stack.script(decode=silence)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        left = asyncio.ensure_future(client.post("/v1/completions", json=body(n=2, stream=stream)))
        await stack.decode.wait(lambda: len(stack.decode.starts) == 6)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await eventually(lambda: len({abort.room for abort in stack.decode.aborts}) == 6)
        assert {abort.failure.cause for abort in stack.decode.aborts} == {"client_gone"}
    await stack.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_fails_ends_all(stack: Stack, stream: bool) -> None:
    async def second_fails(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        if len(start.prompt_token_ids) == 2:
            worker.fail(start.room, grpc.StatusCode.DATA_LOSS, "digest_mismatch")

    stack.script(prefill=silence, decode=second_fails)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        answer = await client.post("/v1/completions", json=body(stream=stream))
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "digest_mismatch")
        others = {start.room for start in stack.decode.starts if len(start.prompt_token_ids) != 2}
        await eventually(lambda: others <= {abort.room for abort in stack.decode.aborts})
    assert {abort.failure.cause for abort in stack.decode.aborts if abort.room in others} == {"other_answer_failed"}
    await stack.settled()


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        (["a", [1]], "prompt[1]", "wrong_type"),
        ([[1], "a"], "prompt[1]", "wrong_type"),
        ([[1], [1, "a"]], "prompt[1]", "wrong_type"),
        (["a", None], "prompt[1]", "wrong_type"),
        (["a", ""], "prompt[1]", "prompt_empty"),
        ([[1], []], "prompt[1]", "prompt_empty"),
        ([[1], [2, 100_000]], "prompt[1][1]", "out_of_range"),
        ([[1], [2] * 600], "prompt[1]", "prompt_too_long"),
        (["a"] * (MAX_ANSWERS + 1), "prompt", "out_of_range"),
        (["a"] * (MAX_ANSWERS // 2 + 1), "prompt", "out_of_range"),
    ],
)
async def test_a_mistake_in_one_is_named_before_any_is_sent(stack: Stack, prompt: Any, param: str, code: str) -> None:
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        answer = await client.post("/v1/completions", json=body(prompt=prompt, n=2))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert not stack.prefill.starts


async def test_no_more_than_there_are_rooms(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(answer=of_prompt, max_rooms=5)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        answer = await client.post("/v1/completions", json=body(n=2))
        assert answer.status_code == 400
        assert "[1, 5] answers" in answer.json()["error"]["message"]
        # They wait for places together, and so go in together.
        both = await asyncio.gather(*(client.post("/v1/completions", json=body()) for _ in range(4)))
    assert [one.status_code for one in both] == [200] * 4
    await stack.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", PROMPTS])
async def test_a_prompt_that_is_scored_and_not_answered(stack: Stack, prompt: Any, stream: bool) -> None:
    """As with max_tokens: 1, without that token."""
    with_one = await completion(stack, prompt=prompt, echo=True, logprobs=2, max_tokens=1)
    fields: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
    if stream:
        async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
            told = events((await client.post("/v1/completions", json=body(**fields, stream=True, stream_options={"include_usage": True}))).text)
        usage = told[-1]["usage"]
        parts = [choice for chunk in told for choice in chunk["choices"]]
        texts = {part["index"]: part for part in parts if part["text"]}
        choices = [texts[index] | {"finish_reason": "length"} for index in sorted(texts)]
        assert sorted(part["index"] for part in parts if part["finish_reason"] == "length") == list(range(len(choices)))
    else:
        scored = await completion(stack, **fields)
        usage, choices = scored["usage"], scored["choices"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (with_one["usage"]["prompt_tokens"], 0)
    for choice, one, text in zip(choices, with_one["choices"], [prompt] if isinstance(prompt, str) else prompt, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert choice["logprobs"] == {name: values[:-1] for name, values in one["logprobs"].items()}
    await stack.settled()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ],
)
async def test_no_answer_without_echo(stack: Stack, fields: dict[str, Any], param: str) -> None:
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        answer = await client.post("/v1/completions", json=body(**fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 400
    assert not stack.prefill.starts


async def test_a_queue_of_starts_that_is_full_opens_none(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had been opened of a request that cannot be opened whole is ended."""
    dispatch, calls = Dispatcher.dispatch, [0]

    def third_fails(self: Dispatcher, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise OverloadedError("as scripted")
        return dispatch(self, *arguments, **named)

    monkeypatch.setattr(Dispatcher, "dispatch", third_fails)
    stack.script(prefill=silence, decode=silence)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        assert (await client.post("/v1/completions", json=body())).status_code == 429
    await stack.settled()
