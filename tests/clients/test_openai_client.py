"""The official `openai` client, sync and async, streamed and whole, in every feature: against a split fleet and a plain one.

What the two say differs in ids and times alone.
"""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from fleet import MODEL, Fleet, wait_for
from prometheus import counted

from baton.gateway.choices import seed_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Name three colours and say why you like them."}]
PROMPT = "The three primary colours are"
#: Of SmolLM2's vocabulary: "<|im_end|>".
EOS = 2

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
GREEDY = {"temperature": 0}

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "name": {"type": "string", "maxLength": 5},
    },
    "required": ["age", "name"],
    "additionalProperties": False,
}

#: (name, is a chat, fields). What is beyond OpenAI's own fields goes through `extra_body`.
CASES: list[tuple[str, bool, dict[str, Any]]] = [
    ("greedy", True, GREEDY),
    ("sampled", True, SAMPLED),
    ("sampled with top_k and min_p", True, SAMPLED | {"extra_body": {"top_k": 40, "min_p": 0.02}}),
    ("stop strings", True, GREEDY | {"stop": ["colour that", "zzz"]}),
    ("stop tokens, min_tokens", True, SAMPLED | {"extra_body": {"stop_token_ids": [28, 30], "min_tokens": 4}}),
    ("ignore_eos", True, GREEDY | {"extra_body": {"ignore_eos": True}}),
    ("presence and frequency", True, GREEDY | {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
    ("repetition", True, GREEDY | {"extra_body": {"repetition_penalty": 1.3}}),
    ("penalties, sampled", True, SAMPLED | {"presence_penalty": 0.8, "frequency_penalty": 0.8, "extra_body": {"repetition_penalty": 1.1}}),
    ("bias", True, SAMPLED | {"logit_bias": {"260": -100, "28": 3}}),
    ("logprobs", True, SAMPLED | {"logprobs": True, "top_logprobs": 3}),
    ("logprobs alone", True, GREEDY | {"logprobs": True}),
    ("completion", False, SAMPLED),
    ("completion, logprobs", False, GREEDY | {"logprobs": 2, "frequency_penalty": 1.0}),
    ("completion, echo", False, GREEDY | {"echo": True}),
    ("held to a schema", True, SAMPLED | {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}),
    ("held to an expression", True, SAMPLED | {"presence_penalty": 0.5, "extra_body": {"structured_outputs": {"regex": "[A-Z][a-z]{1,8}: [0-9]+"}}}),
    ("completion, held to a choice", False, GREEDY | {"extra_body": {"structured_outputs": {"choice": ["red", "green or blue"]}}}),
    ("completion, echo and logprobs", False, GREEDY | {"echo": True, "logprobs": 2}),
    ("completion, bias to the end", False, GREEDY | {"logit_bias": {str(EOS): 100}}),
]
ANSWER_TOKENS = 16


def about(fleet: Fleet) -> dict[str, Any]:
    return {"base_url": f"http://{fleet.http}/v1", "api_key": "unused", "max_retries": 0, "timeout": 120}


def asked(is_chat: bool, fields: dict[str, Any]) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": PROMPT}
    return {"model": MODEL, "max_tokens": ANSWER_TOKENS, **prompt, **fields}


def told(whole: Any) -> dict[str, Any]:
    """A whole answer without its id and its time."""
    body: dict[str, Any] = whole.model_dump(exclude={"id", "created"})
    return body


def joined(chunks: list[Any], is_chat: bool) -> dict[str, Any]:
    """What the chunks of a stream add up to, in the shape of `told`."""
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1, "one answer has one id"
    text, finish, logprobs = "", None, []
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert finish is None, "nothing comes after the finish reason"
        assert chunk.usage is None
        text += (choice.delta.content or "") if is_chat else choice.text
        finish = choice.finish_reason
        if choice.logprobs is not None:
            logprobs.append(choice.logprobs.model_dump())
    assert not chunks[-1].choices
    return {"text": text, "finish": finish, "logprobs": merged(logprobs), "usage": chunks[-1].usage.model_dump()}


def merged(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not parts:
        return None
    return {name: None if parts[0][name] is None else [one for part in parts for one in part[name]] for name in parts[0]}


def as_joined(body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    choice = body["choices"][0]
    text = choice["message"]["content"] if is_chat else choice["text"]
    return {"text": text, "finish": choice["finish_reason"], "logprobs": choice["logprobs"], "usage": body["usage"]}


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two bodies differ; log probabilities may in their last digits, as their batches did, and prefix caches may have had more of a prompt."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [one for name in ours if name != "cached_tokens" for one in differences(ours[name], theirs[name], f"{path}.{name}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [one for number, pair in enumerate(zip(ours, theirs, strict=True)) for one in differences(*pair, f"{path}[{number}]")]
    if isinstance(ours, float) and isinstance(theirs, float) and abs(ours - theirs) < 1e-3:
        return []
    return [] if ours == theirs else [f"{path}: {ours!r} and {theirs!r}"]


async def one_case(client: openai.AsyncOpenAI, is_chat: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """The async client's answer, whole and streamed, which are the same."""
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    request = asked(is_chat, fields)
    whole, stream = await asyncio.gather(create(**request), create(**request, stream=True, stream_options={"include_usage": True}))
    body = told(whole)
    streamed = joined([chunk async for chunk in stream], is_chat)
    assert not differences(streamed, as_joined(body, is_chat))
    return body


async def all_cases(fleet: Fleet) -> dict[str, dict[str, Any]]:
    async with openai.AsyncOpenAI(**about(fleet)) as client:
        bodies = await asyncio.gather(*(one_case(client, is_chat, fields) for _, is_chat, fields in CASES))
    return {name: body for (name, _, _), body in zip(CASES, bodies, strict=True)}


@pytest.fixture(scope="module")
def split_bodies(shm_fleet: Fleet) -> dict[str, dict[str, Any]]:
    bodies = asyncio.run(all_cases(shm_fleet))
    shm_fleet.assert_free()
    return bodies


def test_split_says_what_plain_says(split_bodies: dict[str, dict[str, Any]], plain_fleet: Fleet) -> None:
    plain_bodies = asyncio.run(all_cases(plain_fleet))
    plain_fleet.assert_free()
    assert {name: found for name in plain_bodies if (found := differences(split_bodies[name], plain_bodies[name]))} == {}


def test_each_field_does_what_it_says(split_bodies: dict[str, dict[str, Any]]) -> None:
    def text(name: str) -> str:
        found: str = as_joined(split_bodies[name], "completion" not in name)["text"]
        return found

    assert text("sampled") != text("greedy")
    before, stop, _ = text("greedy").partition("colour that")
    assert stop
    assert text("stop strings") == before
    assert split_bodies["stop strings"]["choices"][0]["finish_reason"] == "stop"
    assert split_bodies["stop tokens, min_tokens"]["usage"]["completion_tokens"] >= 4
    assert split_bodies["ignore_eos"]["usage"]["completion_tokens"] == ANSWER_TOKENS
    assert text("presence and frequency") != text("greedy")
    assert text("repetition") != text("greedy")
    assert text("penalties, sampled") != text("sampled")
    assert text("completion, echo").startswith(PROMPT)
    assert len(text("completion, echo")) > len(PROMPT)
    echoed = split_bodies["completion, echo and logprobs"]["choices"][0]
    assert "".join(echoed["logprobs"]["tokens"]).startswith(PROMPT)
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in echoed["logprobs"]["token_logprobs"][1:])
    ended = split_bodies["completion, bias to the end"]
    assert (ended["usage"]["completion_tokens"], ended["choices"][0]["finish_reason"], ended["choices"][0]["text"]) == (1, "stop", "")
    for name in ("logprobs", "logprobs alone"):
        body = split_bodies[name]
        entries = body["choices"][0]["logprobs"]["content"]
        assert len(entries) == body["usage"]["completion_tokens"]
        assert all(entry["logprob"] <= 0 for entry in entries)
        spelt = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        assert spelt.removesuffix("<|im_end|>") == text(name)
    assert text("logprobs") == text("sampled"), "asking for them changes no token"
    for entry in split_bodies["logprobs"]["choices"][0]["logprobs"]["content"]:
        values = [best["logprob"] for best in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert values[0] >= entry["logprob"] - 1e-6


def is_one(text: str) -> bool:
    """Of `SCHEMA`."""
    value = json.loads(text)
    return list(value) == ["age", "name"] and type(value["age"]) is int and 0 <= value["age"] <= 120 and len(value["name"]) <= 5


def test_a_hundred_sampled_answers_are_all_of_the_schema(shm_fleet: Fleet, split_bodies: dict[str, dict[str, Any]]) -> None:
    """Beside one another, at temperature 1, every fifth a chat; and the end of each comes from the model, not from max_tokens."""
    held: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Invent somebody."}]}

    async def hundred() -> list[Any]:
        async with openai.AsyncOpenAI(**about(shm_fleet)) as client:
            chats: Any = client.chat.completions.create
            with pytest.raises(openai.BadRequestError, match="schema cannot be compiled: Invalid type: thing"):
                await chats(**asked(True, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}}))

            def one(seed: int) -> Any:
                drawn = {"temperature": 1, "seed": seed, "max_tokens": 80}
                if seed % 5 == 0:
                    return chats(**asked(True, drawn | held | chat))
                return client.completions.create(**asked(False, drawn | {"prompt": "A person:", "extra_body": held}))

            return await asyncio.gather(*map(one, range(100)))

    choices = [whole.choices[0] for whole in asyncio.run(hundred())]
    texts = [choice.message.content if number % 5 == 0 else choice.text for number, choice in enumerate(choices)]
    assert [text for text in texts if not is_one(text)] == []
    assert {choice.finish_reason for choice in choices} == {"stop"}
    assert len(set(texts)) > 90
    cut = as_joined(split_bodies["held to a schema"], True)
    assert cut["finish"] == "stop" or cut["usage"]["completion_tokens"] == ANSWER_TOKENS
    assert re.match("[A-Z][a-z]{1,8}: [0-9]", as_joined(split_bodies["held to an expression"], True)["text"])
    assert as_joined(split_bodies["completion, held to a choice"], False)["text"] in ("red", "green or blue")
    shm_fleet.assert_free()


def every_chunk(create: Any, request: dict[str, Any]) -> list[Any]:
    return list(create(**request, stream=True, stream_options={"include_usage": True}))


def test_the_sync_client(shm_fleet: Fleet, split_bodies: dict[str, dict[str, Any]]) -> None:
    with openai.OpenAI(**about(shm_fleet)) as client:
        # Side by side, as threads of one program: a step then computes a token of each.
        with ThreadPoolExecutor() as threads:
            asking = []
            for name, is_chat, fields in (CASES[1], CASES[10], CASES[13], CASES[16]):
                create: Any = client.chat.completions.create if is_chat else client.completions.create
                whole = threads.submit(create, **asked(is_chat, fields))
                streamed = threads.submit(every_chunk, create, asked(is_chat, fields))
                asking.append((name, is_chat, whole, streamed))
            for name, is_chat, whole, streamed in asking:
                assert not differences(told(whole.result()), split_bodies[name]), name
                assert not differences(joined(streamed.result(), is_chat), as_joined(split_bodies[name], is_chat)), name
        raw = client.chat.completions.with_raw_response.create(**asked(True, GREEDY | {"extra_body": {"request_id": "mine-1"}}))
        assert raw.headers["x-request-id"] == "mine-1"
        assert [model.id for model in client.models.list()] == [MODEL]
        scored = client.completions.create(**asked(False, GREEDY | {"extra_body": {"prompt_logprobs": 1}}))
        own = [next(iter(entry.values()))["logprob"] for entry in (scored.choices[0].model_extra or {})["prompt_logprobs"][1:]]
        echoed = split_bodies["completion, echo and logprobs"]["choices"][0]["logprobs"]["top_logprobs"][1 : len(own) + 1]
        assert own == pytest.approx([max(top.values()) for top in echoed], abs=1e-3), "the most probable token at each place comes first"
        with pytest.raises(openai.BadRequestError, match=r"n=65 is outside \[1, 64\]"):
            client.chat.completions.create(**asked(True, {"n": 65}))
        with pytest.raises(openai.BadRequestError, match=r"presence_penalty=3.0 is outside \[-2, 2\]"):
            client.chat.completions.create(**asked(True, {"presence_penalty": 3}))
    shm_fleet.assert_free()


def work_of(fleet: Fleet) -> dict[str, list[float]]:
    """By server: tokens that went through its model, and rooms that ended well."""
    names = ("baton_tokens_computed_total", "baton_rooms_succeeded_total")
    return {worker.spec.name.partition("-")[0]: [counted(worker, name) for name in names] for worker in fleet.workers}


def four_answers(fleet: Fleet) -> tuple[list[str], dict[str, list[float]], Any]:
    """The texts of n = 4, streamed; what the servers did for them; usage."""
    before = work_of(fleet)
    texts, ends = [""] * 4, []
    with openai.OpenAI(**about(fleet)) as client:
        request = asked(True, SAMPLED | {"n": 4, "stream": True, "stream_options": {"include_usage": True}})
        for chunk in client.chat.completions.create(**request):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends += [choice.index] if choice.finish_reason else []
            usage = chunk.usage
    assert sorted(ends) == [0, 1, 2, 3]
    fleet.assert_free()
    wait_for(lambda: sum(tokens for tokens, _ in work_of(fleet).values()) >= usage.completion_tokens, 10, "what the servers counted")
    did = {name: [now - then for now, then in zip(after, before[name], strict=True)] for name, after in work_of(fleet).items()}
    return texts, did, usage


def test_four_answers_take_one_prefill_and_one_transfer(shm_fleet: Fleet, plain_fleet: Fleet) -> None:
    texts, did, usage = four_answers(shm_fleet)
    # Behind the prompt each answer's tokens but its last go through decode, and for three of them the prompt's last token: the first of the four has
    # its first token from prefill.
    computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    assert did == {"prefill": [computed, 1], "decode": [usage.completion_tokens - 1, 4]}
    assert len(set(texts)) == 4
    with openai.OpenAI(**about(shm_fleet)) as client, ThreadPoolExecutor() as threads:
        create: Any = client.chat.completions.create
        four = threads.submit(create, **asked(True, SAMPLED | {"n": 4}))
        alone = threads.submit(create, **asked(True, SAMPLED | {"seed": seed_of(11, 2)}))
        whole = four.result()
        assert [choice.message.content for choice in whole.choices] == texts
        assert not differences(whole.usage.model_dump(), usage.model_dump())
        assert alone.result().choices[0].message.content == texts[2]
    plain_texts, plain_did, plain_usage = four_answers(plain_fleet)
    assert plain_texts == texts
    assert not differences(plain_usage.model_dump(), usage.model_dump())
    computed = plain_usage.prompt_tokens - plain_usage.prompt_tokens_details.cached_tokens
    assert plain_did == {"plain": [computed + usage.completion_tokens - 1, 4]}


class Weather(pydantic.BaseModel):
    """The weather in a town."""

    town: Literal["Paris", "Oslo", "Rome"]
    days: Annotated[int, pydantic.Field(ge=1, le=9)]


class Clock(pydantic.BaseModel):
    """The time in a zone."""

    zone: Literal["UTC", "CET"]


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]
QUESTION = {"role": "user", "content": "The weather in Paris?"}


async def tool_calls(fleet: Fleet) -> list[Any]:
    """What the client library parses: (name, arguments) of each answer's calls, whole and streamed alike."""
    named = {"type": "function", "function": {"name": "Clock"}}
    asked_for: list[dict[str, Any]] = [
        {"tool_choice": named, "temperature": 1, "seed": 3},
        {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "seed": 5},
    ]
    found: list[Any] = []
    async with openai.AsyncOpenAI(**about(fleet)) as client:

        async def both(fields: dict[str, Any]) -> tuple[Any, Any]:
            request: dict[str, Any] = {"model": MODEL, "messages": [QUESTION], "tools": TOOLS, "max_tokens": 60, **fields}
            whole = asyncio.ensure_future(client.chat.completions.parse(**request))
            async with client.chat.completions.stream(**request) as stream:
                return (await whole).choices[0], (await stream.get_final_completion()).choices[0]

        for whole, streamed in await asyncio.gather(*map(both, asked_for)):
            calls = [[(call.function.name, call.function.parsed_arguments) for call in got.message.tool_calls] for got in (whole, streamed)]
            assert calls[0] == calls[1]
            assert (whole.finish_reason, streamed.finish_reason, whole.message.content) == ("tool_calls", "tool_calls", None)
            found.append(calls[0])
        called = [call.model_dump(include={"id": True, "type": True, "function": {"name", "arguments"}}) for call in whole.message.tool_calls or []]
        messages: Any = [QUESTION, {"role": "assistant", "tool_calls": called}, {"role": "tool", "tool_call_id": called[0]["id"], "content": "Rain."}]
        after = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=ANSWER_TOKENS)
        found.append((after.choices[0].message.content, after.choices[0].finish_reason, after.usage.prompt_tokens if after.usage else 0))
    fleet.assert_free()
    return found


def test_tool_calls_are_what_the_client_library_parses(shm_fleet: Fleet, plain_fleet: Fleet) -> None:
    split, plain = (asyncio.run(tool_calls(fleet)) for fleet in (shm_fleet, plain_fleet))
    assert split == plain
    ((name, clock),), *others, last = split
    assert name == "Clock"
    assert isinstance(clock, Clock)
    assert all(isinstance(arguments, {"Weather": Weather, "Clock": Clock}[name]) for ((name, arguments),) in others)
    assert last[2] > 200, "tools and calls are in the prompt"
