"""Structured output through both fronts: which grammar reaches the servers, and what is refused before any of them hears of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import llguidance
import pytest
from gateway_harness import MODEL, Stack, ask, greedy
from gateway_worker import silence
from structlog.testing import capture_logs

from baton.gateway import structured
from baton.gateway.errors import RequestError
from baton.gateway.structured import MAX_GRAMMAR_BYTES, GrammarCheck, Structure
from baton.wire.v1 import common_pb2, inference_pb2

StackOf = Callable[..., Any]

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64}
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 64}
Structured = inference_pb2.StructuredOutput
Choices = inference_pb2.Choices


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema} | more}}


def kind(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def takes(grammar: str, text: str) -> bool:
    """Whether the whole text is one of the grammar's, byte by byte."""
    matcher = llguidance.LLMatcher(BYTES, grammar)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


class Bytes:
    """A tokenizer of bytes, as the library takes them."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([number]) for number in range(256)] + [b"<end>"]
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


BYTES = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))

#: (over HTTP, the same over gRPC, texts that it takes, texts that it does not).
FORMS: list[tuple[dict[str, Any], Any, list[str], list[str]]] = [
    (named(SCHEMA, strict=True, description="x"), Structured(json_schema=json.dumps(SCHEMA)), ['{"n":1}', '{\n  "n": -20\n}'], ["{}", '{"n":1}x']),
    (kind(json=SCHEMA), Structured(json_schema=json.dumps(SCHEMA)), ['{"n": 1}'], ['{"n": "1"}', '{"n":     1}']),
    ({"response_format": {"type": "json_object"}}, Structured(json_object=True), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{"]),
    (kind(regex="[a-c]+x?"), Structured(regex="[a-c]+x?"), ["ab", "cx"], ["x", "abd"]),
    (kind(choice=["yes", 'n"o', "ja\n"]), Structured(choice=Choices(texts=["yes", 'n"o', "ja\n"])), ["yes", 'n"o', "ja\n"], ["no", "y"]),
    (kind(grammar='start: "(" start ")" | "1"'), Structured(grammar='start: "(" start ")" | "1"'), ["((1))"], ["((1)", "2"]),
]


@pytest.fixture
async def stack(stack_of: StackOf) -> Stack:
    made: Stack = await stack_of()
    return made


async def test_each_form_reaches_both_servers_over_both_fronts(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as raw:
        for over_http, over_grpc, sound, unsound in FORMS:
            for path, body in (("chat/completions", CHAT), ("completions", COMPLETION)):
                assert (await raw.post(f"/v1/{path}", json=body | over_http)).status_code == 200
            await stack.reply(ask(sampling=greedy(structured=over_grpc)))
            await stack.settled()
            sent = {start.sampling.grammar for worker in (stack.prefill, stack.decode) for start in worker.starts[-3:]}
            (grammar,) = sent
            assert [takes(grammar, text) for text in sound] == [True] * len(sound)
            assert [takes(grammar, text) for text in unsound] == [False] * len(unsound)
        assert (await raw.post("/v1/chat/completions", json=CHAT | {"response_format": {"type": "text"}})).status_code == 200
        assert (await raw.post("/v1/chat/completions", json=CHAT | kind(json_object=False))).status_code == 200
        assert [start.sampling.grammar for start in stack.decode.starts[-2:]] == ["", ""]
    await stack.settled()


REFUSALS: list[tuple[dict[str, Any], str, str, str]] = [
    (named({"type": "thing"}), "response_format.json_schema.schema", "structured_output", "thing"),
    (named({"type": "array", "uniqueItems": True}), "response_format.json_schema.schema", "structured_output", "uniqueItems"),
    (named({"$ref": "#/nowhere"}), "response_format.json_schema.schema", "structured_output", "nowhere"),
    (named(SCHEMA, other=1), "response_format.json_schema.other", "unsupported", "not a field"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_field", "missing"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "wrong_type", "xml"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "unsupported", "not a field"),
    (named(SCHEMA) | kind(regex="a"), "structured_outputs", "invalid_request", "send one"),
    (kind(regex="a", choice=["b"]), "structured_outputs", "invalid_request", "regex and choice"),
    (kind(), "structured_outputs", "invalid_request", "exactly one"),
    (kind(regex="("), "structured_outputs.regex", "structured_output", "unclosed"),
    (kind(regex="(?=a)b"), "structured_outputs.regex", "structured_output", "look-around"),
    (kind(regex=""), "structured_outputs.regex", "structured_output", "empty"),
    (kind(grammar="start: nobody"), "structured_outputs.grammar", "structured_output", "nobody"),
    (kind(grammar="start: <|nobody|>"), "structured_outputs.grammar", "structured_output", "nobody"),
    (kind(choice=[]), "structured_outputs.choice", "out_of_range", "[1, 1024]"),
    (kind(choice=["a", ""]), "structured_outputs.choice[1]", "structured_output", "empty"),
    (kind(choice=["a", 1]), "structured_outputs.choice[1]", "wrong_type", "string"),
    (kind(json="[1]"), "structured_outputs.json", "structured_output", "an object"),
    (kind(json="{"), "structured_outputs.json", "structured_output", "no JSON schema"),
    (kind(json=1), "structured_outputs.json", "wrong_type", "JSON schema"),
    (kind(regex="a" * (MAX_GRAMMAR_BYTES + 1)), "structured_outputs.regex", "out_of_range", f"[1, {MAX_GRAMMAR_BYTES}] bytes"),
    (named(SCHEMA) | {"min_tokens": 2}, "min_tokens", "structured_output", "response_format.json_schema.schema"),
    (named(SCHEMA) | {"ignore_eos": True}, "ignore_eos", "structured_output", "response_format.json_schema.schema"),
]


async def test_a_mistake_names_its_field_and_no_server_hears_of_it(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as raw:
        for fields, param, code, part in REFUSALS:
            answer = await raw.post("/v1/chat/completions", json=CHAT | fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
            assert part in error["message"], error
    for given, field in (
        (Structured(json_schema='{"type": "thing"}'), "sampling.structured.json_schema"),
        (Structured(regex="("), "sampling.structured.regex"),
        (Structured(choice=Choices()), "sampling.structured.choice.texts"),
        (Structured(), "sampling.structured"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stack.reply(ask(sampling=greedy(structured=given)))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in (refused.value.details() or "")
    assert not stack.prefill.starts
    assert not stack.decode.starts


async def test_a_server_that_would_answer_anything_gets_no_such_request(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(worker={"decode": {"sampling_level": 1}})
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as raw:
        refused = await raw.post("/v1/chat/completions", json=CHAT | named(SCHEMA))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format.json_schema.schema"
        assert "older version" in refused.json()["error"]["message"]
        assert (await raw.post("/v1/chat/completions", json=CHAT | {"presence_penalty": 1})).status_code == 200
    await stack.settled()


async def test_a_sound_grammar_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck(Path())
    looked: list[str] = []
    problem = check._problem
    monkeypatch.setattr(check, "_problem", lambda grammar: looked.append(grammar) or problem(grammar))
    monkeypatch.setattr(structured, "MAX_KNOWN_BYTES", 250)
    texts = [structured.regex(f"a{{{number}}}" + "x" * 60, "regex") for number in range(1, 5)]
    for each in (*texts, texts[-1], texts[0]):
        await check.check(each)
    assert looked == [each.grammar for each in (*texts, texts[0])]
    with pytest.raises(RequestError, match="regex cannot be compiled"):
        await check.check(Structure('{"grammars": [{"lark_grammar": "start: ("}]}', "regex"))


@pytest.mark.parametrize("kind_of_chain", ["rules", "references"])
async def test_what_names_one_another_thousands_of_times(kind_of_chain: str) -> None:
    """The library recurses along it: on a thread's usual stack it ends the process."""
    if kind_of_chain == "rules":
        rules = "\n".join(f'r{number}: "1" r{number + 1}' for number in range(12_000))
        structure = structured.lark(f'start: r0\n{rules}\nr12000: "0"', "grammar")
    else:
        chain: dict[str, Any] = {str(number): {"items": {"$ref": f"#/$defs/{number + 1}"}} for number in range(3_000)}
        structure = structured.json_schema({"$ref": "#/$defs/0", "$defs": chain | {"3000": {"type": "integer"}}}, "schema")
    await GrammarCheck(Path()).check(structure)


@pytest.mark.parametrize("cause", ["grammar_invalid", "grammar_fault"])
async def test_what_a_server_finds_wrong_with_a_grammar_names_its_field_and_is_in_no_log(stack: Stack, cause: str) -> None:
    """What only a model's tokenizer tells: a grammar that takes no text, or that becomes too large on the way."""

    async def unwilling(worker: Any, start: Any) -> None:
        worker.fail(start.room, grpc.StatusCode.INVALID_ARGUMENT, cause, "it says secret", origin=common_pb2.ORIGIN_CLIENT)

    stack.script(prefill=unwilling, decode=silence)
    with capture_logs() as lines:
        async with httpx.AsyncClient(base_url=stack.http, timeout=20) as raw:
            for stream in (False, True):
                answer = await raw.post("/v1/chat/completions", json=CHAT | named(SCHEMA) | {"stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"], error["code"]) == (400, "response_format.json_schema.schema", cause)
                assert error["message"].startswith("response_format.json_schema.schema: it says secret")
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.structured\.regex: it says secret"):
            await stack.reply(ask(sampling=greedy(structured=Structured(regex="a"))))
    await stack.settled()
    assert [line["cause"] for line in lines if line["event"] == "room failed"] == [cause] * 3
    assert "secret" not in str(lines)


def test_a_schema_that_is_nested_too_deeply() -> None:
    with pytest.raises(RequestError, match="schema"):
        structured.json_schema('{"items":' * 100_000 + "1" + "}" * 100_000, "schema")
