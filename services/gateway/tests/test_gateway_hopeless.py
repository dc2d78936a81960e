"""Requests that are too long by far: refused with numbers, by a count, before a tokenizer or a parser works on them for long."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.body_limits import BodyLimits
from baton.gateway.chat_template import ChatTemplate
from baton.gateway.errors import RenderedTooLongError, TooManyValuesError
from baton.gateway.grpc_front import _chat_prompt
from baton.gateway.http import body
from baton.gateway.http.body import check_values
from baton.gateway.http.parse import parse_chat
from baton.wire.v1 import inference_pb2
from baton.wire.v1.inference_pb2 import ChatMessage

WORDS = "hello " * 500_000


@pytest.fixture
async def idle(split: Stack) -> Stack:
    """A gateway whose tokenizer must not be asked."""

    class Tokenizer:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the tokenizer's {name} was asked for")

    split.tokenizer._tokenizer = Tokenizer()  # type: ignore[assignment]
    return split


async def error_of(stack: Stack, path: str, content: Any) -> tuple[int, dict[str, Any]]:
    async with httpx.AsyncClient(base_url=stack.http, timeout=60) as client:
        answer = await client.post(f"/v1/{path}", content=content if isinstance(content, bytes) else json.dumps(content).encode())
    return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "field", "content"),
    [
        ("completions", "prompt", {"model": MODEL, "prompt": WORDS}),
        ("chat/completions", "messages", {"model": MODEL, "messages": [{"role": "user", "content": WORDS}]}),
        ("chat/completions", "messages", {"model": MODEL, "messages": [{"role": "user", "content": "hello " * 40}] * 100}),
        ("chat/completions", "messages", {"model": MODEL, "messages": [{"role": "user", "content": ""}] * 600}),
    ],
)
async def test_a_prompt_that_cannot_fit_is_not_tokenised(idle: Stack, path: str, field: str, content: Any) -> None:
    status, error = await error_of(idle, path, content)
    assert (status, error["param"], error["code"]) == (400, field, "prompt_too_long")
    assert "the limit is 511 (the context of prefill server prefill-0, less one token for the answer): shorten it" in error["message"]
    assert any(words in error["message"] for words in ("tokens or more", "more than 511 tokens", "600 messages, each of a token or more"))


async def test_nor_one_over_grpc(idle: Stack) -> None:
    for request, words in (
        (ask(text=WORDS), "3000000 characters"),
        (ask(text="", token_ids=inference_pb2.TokenIds(ids=[5] * 900_000)), "900000 tokens"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await idle.reply(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in str(caught.value.details())
        assert "the limit is 511" in str(caught.value.details())


async def test_what_fits_is_taken_to_the_last_token(split: Stack) -> None:
    longest = "<|endoftext|>" * 511
    assert (await split.reply(ask(text=longest, sampling=inference_pb2.SamplingParams(max_tokens=1)))).last.usage.prompt_tokens == 511
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await split.reply(ask(text=longest + "<|endoftext|>"))
    assert "512 tokens" in str(caught.value.details())


def test_a_template_is_stopped_when_its_text_is_too_long() -> None:
    template = ChatTemplate("{% for number in range(99999) %}{{ messages[0]['content'] }}{% endfor %}", {})
    with pytest.raises(RenderedTooLongError) as caught:
        template.render([{"role": "user", "content": "x" * 100}], 1000)
    assert caught.value.num_chars == 1100
    assert len(ChatTemplate("{{ messages[0]['content'] }}", {}).render([{"role": "user", "content": "x" * 1000}], 1000)) == 1000


# --- bodies of very many values ----------------------------------------------------------------------------------------------------


async def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(stack_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stack: Stack = await stack_of()
    monkeypatch.setattr(body, "parse_json_object", lambda raw: pytest.fail("it was parsed"))
    for content in (b"1," * 3_000_000, b'"a",' * 1_000_000, b'{"a":"b"},' * 700_000):
        whole = b'{"model":"tiny","prompt":[' + content + b"1]}"
        status, error = await error_of(stack, "completions", whole)
        assert (status, error["code"], error["type"]) == (413, "body_too_large", "invalid_request_error")
        assert f"the limit is {BodyLimits().num_values}: send fewer" in error["message"]


async def test_a_large_body_is_parsed_off_the_loop(split: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its fields looked at there as well."""
    threads: list[str] = []

    def noted(fields: dict[str, Any]) -> Any:
        threads.append(threading.current_thread().name)
        return parse_chat(fields)

    monkeypatch.setattr("baton.gateway.http.app.parse_chat", noted)
    status, error = await error_of(split, "chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}] * 2000})
    assert (status, error["code"]) == (400, "prompt_too_long")
    assert threads
    assert "MainThread" not in threads


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab,"\\{}[]:\n'), max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(st.sampled_from('a,"\\'), max_size=4), inner, max_size=5),
    max_leaves=40,
)


def num_values(value: Any) -> int:
    """Texts, names of fields, and what separates values."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return sum(map(num_values, value)) + max(0, len(value) - 1)
    if isinstance(value, dict):
        return sum(map(num_values, value.values())) + len(value) + max(0, len(value) - 1)
    return 0


@given(JSON, st.booleans())
def test_values_are_counted_as_they_are_whatever_is_in_the_texts(value: Any, indent: bool) -> None:
    raw = json.dumps(value, indent=1 if indent else None).encode()
    count = num_values(value)
    check_values(raw, count)
    if count:
        with pytest.raises(TooManyValuesError):
            check_values(raw, count - 1)


def test_a_chat_of_very_many_messages_over_grpc_is_not_looked_through() -> None:
    request = inference_pb2.ChatRequest(model=MODEL, messages=[ChatMessage(role="user", content="x")] * 4)
    assert len(_chat_prompt(request, 4).messages) == 4
    with pytest.raises(TooManyValuesError, match="messages has 4 messages, the limit is 3: send fewer"):
        _chat_prompt(request, 3)
