"""Tools: how calls are found in text, what of them reaches a client over both fronts, and what the model and the servers are told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_harness import MODEL, Stack, greedy, start_stack
from gateway_model import make_model_folder
from openai.lib.streaming.chat import ChatCompletionStreamState
from tokenizers import AddedToken, Tokenizer

from baton.gateway.chat_template import ChatTemplate
from baton.gateway.dialect import Dialect, dialect_of
from baton.gateway.errors import UnsupportedError
from baton.gateway.requests import ChatPrompt
from baton.gateway.tools.formats import HERMES, LLAMA3, MISTRAL, CallFormat
from baton.gateway.tools.offer import NO_PARAMETERS, Offer, Tool
from baton.gateway.tools.parser import parser_of
from baton.wire.v1 import common_pb2, inference_pb2

StackOf = Callable[..., Any]
TWO = (Tool("f", None, NO_PARAMETERS), Tool("g", "It does.", {"type": "object", "properties": {"x": {"type": "integer"}}}))
Calls = list[tuple[str, str]]


def split(text: str, form: CallFormat, rng: random.Random | None, **offer: Any) -> tuple[str, Calls, int]:
    """The text fed in pieces: what is said, and the calls as their parts add up."""
    parser = parser_of(Offer(TWO, **offer), form)
    said, calls, place = "", {}, 0  # type: ignore[var-annotated]
    pieces = []
    while place < len(text):
        size = len(text) if rng is None else rng.randint(1, 7)
        pieces.append(text[place : place + size])
        place += size
    for each in [*map(parser.feed, pieces), parser.finish()]:
        said += each.text
        for part in each.calls:
            if part.index not in calls:
                assert part.call_id
                assert part.name
                calls[part.index] = (part.name, "")
            else:
                assert not part.call_id
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.arguments)
    assert list(calls) == list(range(len(calls)))
    return said, list(calls.values()), parser.num_calls


F1 = '{"name": "f", "arguments": {"x": 1}}'
TEXTS: list[tuple[CallFormat, str, str, Calls]] = [
    (HERMES, f"<tool_call>\n{F1}\n</tool_call>", "", [("f", '{"x": 1}')]),
    (HERMES, f"Let me see.\n<tool_call>{F1}</tool_call>\n<tool_call>\n{F1}\n</tool_call>", "Let me see.", [("f", '{"x": 1}')] * 2),
    (HERMES, '<tool_call>{"arguments": {"x": "</tool_call>}\\""} , "name": "g"}</tool_call> Done', " Done", [("g", '{"x": "</tool_call>}\\""}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": [1, {"y"', "", [("f", '{"x": [1, {"y"')]),
    (HERMES, '<tool_call>{"name": "h", "arguments": {}}</tool_call> no', '<tool_call>{"name": "h", "arguments": {}}</tool_call> no', []),
    (HERMES, "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    (HERMES, "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, "a <tool_cal> b < c \n", "a <tool_cal> b < c \n", []),
    (HERMES, "ends in <tool_", "ends in <tool_", []),
    (HERMES, f"no mark: {F1}", f"no mark: {F1}", []),
    (LLAMA3, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (LLAMA3, ' \n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (LLAMA3, '{"answer": {"name": "f"}}, see?', '{"answer": {"name": "f"}}, see?', []),
    (LLAMA3, f"So: {F1}", f"So: {F1}", []),
    (MISTRAL, f"[TOOL_CALLS] [{F1}, {F1}]", "", [("f", '{"x": 1}')] * 2),
    (MISTRAL, "In [TOOL] and [1]", "In [TOOL] and [1]", []),
]


@pytest.mark.parametrize(("form", "text", "said", "calls"), TEXTS)
def test_calls_are_found_wherever_the_text_is_cut(form: CallFormat, text: str, said: str, calls: Calls) -> None:
    for seed in (None, *range(25)):
        assert split(text, form, None if seed is None else random.Random(seed)) == (said, calls, len(calls))


def test_calls_that_were_demanded() -> None:
    array = f'[{F1}, {{"name": "g", "arguments": {{}}}}]'
    for seed in range(10):
        rng = random.Random(seed)
        assert split(array, MISTRAL, rng, choice="required") == ("", [("f", '{"x": 1}'), ("g", "{}")], 2)
        assert split(array, MISTRAL, rng, choice="required", parallel=False) == ("", [("f", '{"x": 1}')], 1)
        assert split('{"x": 1}', HERMES, rng, choice="named", function="g") == ("", [("g", '{"x": 1}')], 1)
    assert split(f"<tool_call>{F1}</tool_call><tool_call>{F1}</tool_call>", HERMES, None, parallel=False)[1:] == ([("f", '{"x": 1}')], 1)


def test_arguments_are_told_as_they_come() -> None:
    parser = parser_of(Offer(TWO), HERMES)
    pieces = ('<tool_call>{"name": "f", ', '"arguments": {"x"', ": 1", "}")
    told = [parser.feed(text).calls for text in pieces]
    assert ["".join(part.name + part.arguments for part in parts) for parts in told] == ["f", '{"x"', ": 1", "}"]


TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ messages[0].content }}",
    "llama3": "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ tools }}ipython {\"name\": x, \"parameters\": y}",
    "mistral": "{{ tools }}[TOOL_CALLS]",
}  # fmt: skip


def test_a_template_says_what_it_takes() -> None:
    for name, template in TEMPLATES.items():
        assert ChatTemplate(template, {}).takes_tools, name
        made = dialect_of(template, True)
        assert (made.form is not None and made.form.name, made.by_template) == (name, True)
        assert dialect_of(template, True, "none").form is None
    silent = "{{ messages[0].content }}"
    assert not ChatTemplate(silent, {}).takes_tools
    assert dialect_of(silent, False).form is None
    assert dialect_of(silent, False, "mistral") == Dialect(MISTRAL, False, False)
    assert dialect_of(None, False).form is None


def test_what_a_template_without_a_place_for_tools_is_told() -> None:
    """The functions, and calls of earlier turns, in the format that the operator named."""
    earlier = {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [earlier]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    told, tools = Dialect(HERMES).view(ChatPrompt(messages, offer=Offer(TWO)))
    assert tools is None
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool"]
    assert all(json.dumps(tool.told()) in told[0]["content"] for tool in TWO)
    assert told[2] == {"role": "assistant", "content": '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>'}
    system = {"role": "system", "content": "Be brief."}
    assert Dialect(HERMES).view(ChatPrompt([system], offer=Offer(TWO)))[0][0]["content"].startswith("Be brief.\n\nYou may call")
    assert Dialect(HERMES, by_template=True).view(ChatPrompt(messages, offer=Offer(TWO))) == (messages, [tool.told() for tool in TWO])
    for prompt, field in ((ChatPrompt(messages[:1], offer=Offer(TWO)), "tools"), (ChatPrompt(messages), "messages[1].tool_calls")):
        with pytest.raises(UnsupportedError, match="--tool-call-format") as refused:
            Dialect().view(prompt)
        assert refused.value.field == field


# --- through the fronts -----------------------------------------------------------------------------------------------------------

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_call_id %}{{ message.tool_call_id }}:{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
ANSWER = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"town": "日本"}}\n</tool_call>'
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("tools") / "tiny", TEMPLATE)


async def streamed(client: openai.AsyncOpenAI, **request: Any) -> Any:
    """As the client library's own accumulator puts the chunks together."""
    state = ChatCompletionStreamState(input_tools=request.get("tools", openai.NOT_GIVEN))
    stream = await client.chat.completions.create(**request, stream=True)
    async for chunk in stream:
        state.handle_chunk(chunk)
    return state.get_final_completion()


def without_ids(message: Any) -> dict[str, Any]:
    body: dict[str, Any] = message.model_dump(exclude={"parsed"})
    for call in body["tool_calls"] or []:
        assert call.pop("id").startswith("call_")
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    return body


async def test_calls_whole_and_streamed_over_http_and_over_grpc(folder: Path) -> None:
    async with start_stack(folder, answer=ANSWER) as stack:
        async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20) as client:
            request: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": [WEATHER], "max_tokens": 130}
            whole = (await client.chat.completions.create(**request)).choices[0]
            assert whole.finish_reason == "tool_calls"
            assert whole.message.content == "I look."
            (call,) = whole.message.tool_calls or []
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "日本"})
            parts = (await streamed(client, **request)).choices[0]
            assert parts.finish_reason == "tool_calls"
            assert without_ids(parts.message) == without_ids(whole.message)
            none = (await client.chat.completions.create(**request, tool_choice="none")).choices[0]
            assert (none.message.content, none.message.tool_calls, none.finish_reason) == (ANSWER, None, "stop")
        told = [stack.tokenizer._tokenizer.decode(start.prompt_token_ids, skip_special_tokens=False) for start in stack.prefill.starts]
        assert [json.dumps(WEATHER) in text for text in told] == [True, True, False]
        assert [start.sampling.grammar for start in stack.prefill.starts] == [""] * 3
        tool = inference_pb2.Tool(name="weather", parameters=json.dumps(WEATHER["function"]["parameters"]))
        reply = await stack.chat("hello", tools=[tool], sampling=greedy(max_tokens=130))
        calls = [part for message in reply.messages for part in message.tool_calls]
        assert (calls[0].name, "".join(part.arguments for part in calls)) == ("weather", '{"town": "日本"}')
        assert (reply.text, reply.last.finish_reason) == ("I look.", common_pb2.FINISH_REASON_TOOL_CALLS)
        await stack.settled()


async def test_a_call_that_is_demanded_is_held_to_its_schema(folder: Path) -> None:
    town = '{"town": "x"}'
    array = f'[{{"name": "weather", "arguments": {town}}}]'
    required: dict[str, Any] = {"tool_choice": "required"}
    named: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    for answer, choice in ((array, required), (town, named)):
        async with start_stack(folder, answer=answer) as stack:
            async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20) as client:
                request: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": [WEATHER], "max_tokens": 100} | choice
                for got in ((await client.chat.completions.create(**request)), await streamed(client, **request)):
                    message = got.choices[0].message
                    assert (message.content or "", got.choices[0].finish_reason) == ("", "tool_calls")
                    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == [("weather", town)]
            assert all('"town"' in start.sampling.grammar for start in (*stack.prefill.starts, *stack.decode.starts))
            await stack.settled()


async def test_a_mark_that_is_a_special_token_is_seen(tmp_path: Path) -> None:
    """Mistral's; other special tokens are still left out of the text."""
    folder = make_model_folder(tmp_path / "tiny", TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    answer = 'Now<|im_start|>[TOOL_CALLS][{"name": "weather", "arguments": {"town": "x"}}]'
    async with start_stack(folder, answer=answer) as stack:
        async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20) as client:
            request: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": [WEATHER], "max_tokens": 130}
            message = (await client.chat.completions.create(**request)).choices[0].message
        assert message.content == "Now"
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == [("weather", '{"town": "x"}')]
        await stack.settled()


async def test_results_of_tools_go_back_into_the_prompt(folder: Path) -> None:
    call = {"id": "call_7", "type": "function", "function": {"name": "weather", "arguments": '{"town": "x"}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_7", "content": "rain"}]
    async with start_stack(folder) as stack, openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        request: Any = {"model": MODEL, "messages": messages, "max_tokens": 64}
        assert (await client.chat.completions.create(**request)).choices[0].message.content == "the answer is forty two"
        over_grpc = [
            inference_pb2.ChatMessage(role="user", content="hello"),
            inference_pb2.ChatMessage(role="assistant", tool_calls=[inference_pb2.ToolCall(id="call_7", name="weather", arguments='{"town": "x"}')]),
            inference_pb2.ChatMessage(role="tool", content="rain", tool_call_id="call_7"),
        ]
        asked = inference_pb2.ChatRequest(model=MODEL, messages=over_grpc, sampling=greedy(max_tokens=64))
        assert [message async for message in stack.stub.Chat(asked, timeout=20)]
        prompts = [stack.tokenizer._tokenizer.decode(start.prompt_token_ids, skip_special_tokens=False) for start in stack.prefill.starts]
        assert prompts[0] == prompts[1]
        assert '<tool_call>{"name": "weather", "arguments": {"town": "x"}}</tool_call><|im_end|>' in prompts[0]
        assert "call_7:rain<|im_end|>" in prompts[0]


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "twice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].name", "1 to 64"),
    ({"tools": [{"type": "web"}]}, "tools[0].type", "only functions"),
    ({"tools": [WEATHER] * 129}, "tools", "129 tools"),
    ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
    ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice", "none, auto, required"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "'other'"),
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format", "send one"),
    ({"tools": [WEATHER], "tool_choice": "required", "min_tokens": 2}, "min_tokens", "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}], "tool_choice": "required"},
        "tool_choice",
        "thing",
    ),
    ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls", "assistant's"),
    ({"messages": [USER | {"tool_call_id": "x"}]}, "messages[0].tool_call_id", "of role tool"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON object",
    ),
]


async def test_mistakes(folder: Path, stack_of: StackOf) -> None:
    async with start_stack(folder) as stack, openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        for fields, param, part in MISTAKES:
            request: Any = {"model": MODEL, "messages": [USER], "extra_body": fields}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**request)
            assert refused.value.param == param, fields
            assert part in str(refused.value)
        assert not stack.prefill.starts
    silent: Stack = await stack_of()
    async with openai.AsyncOpenAI(base_url=f"{silent.http}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        request = {"model": MODEL, "messages": [USER], "tools": [WEATHER]}
        with pytest.raises(openai.BadRequestError, match="says nothing of tools"):
            await client.chat.completions.create(**request)
