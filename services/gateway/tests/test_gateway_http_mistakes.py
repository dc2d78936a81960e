"""Callers' mistakes over HTTP: each an error of OpenAI's shape that names field, value and limit."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from gateway_bodies import CHAT, USER
from gateway_harness import MODEL, Stack

StackOf = Callable[..., Any]

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
    ("chat/completions", CHAT | {"n": 0}, 400, "n", "out_of_range", ["n=0 ", "[1, 64]"]),
    ("completions", {"model": MODEL, "prompt": "x", "best_of": 2}, 400, "best_of", "unsupported", ["best_of=2 ", "with n"]),
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
    ("chat/completions", CHAT | {"n": 65}, 400, "n", "out_of_range", ["n=65 ", "[1, 64]"]),
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
    ("chat/completions", CHAT | {"temprature": 1}, 400, "temprature", "unsupported", ["not a field"]),
    ("chat/completions", CHAT | {"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_request", ["stream=true only"]),
    ("chat/completions", CHAT | {"request_id": "caf\u00e9"}, 400, "request_id", "invalid_request", ["printable ASCII"]),
    ("completions", {"model": MODEL, "prompt": ""}, 400, "prompt", "prompt_empty", ["prompt is empty"]),
    ("completions", {"model": MODEL, "prompt": []}, 400, "prompt", "prompt_empty", ["prompt is empty"]),
    ("completions", {"model": MODEL}, 400, "prompt", "missing_field", ["prompt is missing"]),
    ("completions", {"model": MODEL, "prompt": ["a", 1]}, 400, "prompt[1]", "wrong_type", ["a string, as the first one"]),
    ("completions", {"model": MODEL, "prompt": [1, "a"]}, 400, "prompt", "wrong_type", ["array of token ids"]),
    ("completions", {"model": MODEL, "prompt": [1, 99_999]}, 400, "prompt[1]", "out_of_range", ["=99999 "]),
    ("completions", {"model": MODEL, "prompt": [-1]}, 400, "prompt[0]", "out_of_range", ["=-1 "]),
    ("completions", {"model": MODEL, "prompt": "x" * 600}, 400, "prompt", "prompt_too_long", ["600 tokens", "511"]),
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
