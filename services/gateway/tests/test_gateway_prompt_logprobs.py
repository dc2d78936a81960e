"""Log probabilities of prompts at both fronts, from rooms that go wrong too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, failure_of, greedy, rest
from gateway_worker import ScriptedWorker, by_the_book, scripted_prompt_logprobs, silence

from baton.gateway import grpc_front
from baton.wire.v1 import common_pb2, worker_pb2

StackOf = Callable[..., Any]

PROMPT = [40, 41, 42, 43]
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}


def own(token: int) -> Any:
    """What scripted workers say of it."""
    return pytest.approx(-token / 1000)


async def post(stack: Stack, path: str, **fields: Any) -> Any:
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        return await client.post(f"/v1/{path}", json=fields)


@pytest.mark.parametrize("num_plain", [0, 1])
@pytest.mark.parametrize("num", [1, 2])
async def test_over_grpc_they_come_before_the_answer(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch, num_plain: int, num: int) -> None:
    monkeypatch.setattr(grpc_front, "PROMPT_LOGPROBS_AT_ONCE", 2)
    stack: Stack = await stack_of(plain=num_plain)
    reply = await stack.reply(ask(sampling=greedy(prompt_logprobs=2, n=num)))
    start = stack.of("plain" if num_plain else "prefill").starts[0]
    told = [index for index, message in enumerate(reply.messages) if message.prompt_logprobs]
    assert told == list(range(1, 1 + len(told))), "right behind the first message"
    assert all(len(reply.messages[index].prompt_logprobs) <= 2 for index in told)
    said = [one for index in told for one in reply.messages[index].prompt_logprobs]
    assert said == scripted_prompt_logprobs(start)
    assert len(said) == len(start.prompt_token_ids) - 1
    for worker in stack.workers:
        for fork in (start for start in worker.starts if start.HasField("fork")):
            assert not fork.sampling.HasField("prompt_logprobs")


async def test_another_answer_that_is_sooner_waits_for_them(split: Stack) -> None:
    """Prefill's word comes over another stream than what decode makes of forks."""

    async def forks_only(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        if start.HasField("fork"):
            await by_the_book(worker, start)

    split.script(silence, forks_only)
    call = split.call(ask(sampling=greedy(prompt_logprobs=1, n=2)))
    start = await split.prefill.next_start()
    await eventually(lambda: split.gateway.rooms.outcomes["success"] == 1)  # the fork's whole answer is here
    split.script(by_the_book, by_the_book)
    await by_the_book(split.prefill, start)
    await by_the_book(split.decode, next(one for one in split.decode.starts if one.room == start.room))
    messages = await rest(call)
    assert messages[0].request_id
    assert messages[1].prompt_logprobs
    assert {message.choice for message in messages} == {0, 1}


async def test_who_did_not_ask_is_told_nothing(split: Stack) -> None:
    reply = await split.reply()
    assert not any(message.prompt_logprobs for message in reply.messages)
    assert "prompt_logprobs" not in (await post(split, "completions", **BODY)).json()["choices"][0]


async def test_an_echo_has_its_tokens_log_probabilities(split: Stack) -> None:
    for stream in (False, True):
        answer = await post(split, "completions", **BODY, echo=True, logprobs=1, stream=stream)
        if stream:
            lines = [httpx.Response(200, content=line[6:]).json() for line in answer.text.split("\n\n") if line.startswith("data: {")]
            parts = [line["choices"][0] for line in lines]
            logprobs: dict[str, list[Any]] = {}
            for part in parts:
                for name, values in (part["logprobs"] or {}).items():
                    logprobs.setdefault(name, []).extend(values)
            text = "".join(part["text"] for part in parts)
        else:
            (choice,) = answer.json()["choices"]
            text, logprobs = choice["text"], choice["logprobs"]
        spelt = await split.tokenizer.spell_all(PROMPT)
        assert text.startswith(spelt)
        assert "".join(logprobs["tokens"]) == text
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:4] == [own(41), own(42), own(43)]
        assert [len(top) for top in logprobs["top_logprobs"][1:4]] == [1] * 3
        assert logprobs["text_offset"][:5] == [0, 1, 2, 3, 4]
        assert len(logprobs["tokens"]) == 4 + 2


async def test_the_field_of_their_own_is_as_vllm_has_it(split: Stack) -> None:
    (choice,) = (await post(split, "completions", **BODY, prompt_logprobs=2)).json()["choices"]
    assert choice["logprobs"] is None
    first, second, *_ = choice["prompt_logprobs"]
    assert first is None
    assert len(choice["prompt_logprobs"]) == 4
    spelt = {str(token): await split.tokenizer.spell_all([token]) for token in (41, 40)}
    assert second == {
        "41": {"logprob": own(41), "rank": 1, "decoded_token": spelt["41"]},
        "40": {"logprob": pytest.approx(-1.041), "rank": 2, "decoded_token": spelt["40"]},
    }
    chat = (await post(split, "chat/completions", model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=2, prompt_logprobs=0)).json()
    prompt = split.prefill.starts[-1].prompt_token_ids
    assert [list(entry or {}) for entry in chat["prompt_logprobs"]] == [[], *([str(token)] for token in prompt[1:])]
    assert "prompt_logprobs" not in chat["choices"][0]


async def test_both_at_once_have_as_many_as_each_asked_for(split: Stack) -> None:
    (choice,) = (await post(split, "completions", **BODY, echo=True, logprobs=0, prompt_logprobs=3)).json()["choices"]
    assert split.prefill.starts[0].sampling.prompt_logprobs == 3
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:4]] == [1] * 3  # its own
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3] * 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs", "[0, 20]"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=false only"),
        ({"echo": True, "logprobs": 21}, "logprobs", "[0, 20]"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(split: Stack, fields: dict[str, Any], param: str, words: str) -> None:
    answer = await post(split, "completions", **BODY, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"]


async def test_servers_of_an_older_version_are_not_asked(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(worker={"prefill": {"sampling_level": 2}})
    code, failure = await failure_of(stack.call(ask(sampling=greedy(prompt_logprobs=1))))
    assert (code, failure.cause) == (grpc.StatusCode.INVALID_ARGUMENT, "unsupported")
    assert "sampling.prompt_logprobs" in failure.message


async def test_a_first_token_without_them_fails_the_room(split: Stack) -> None:
    async def forgets(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        part = worker_pb2.RoomPromptLogprobs(room=start.room, first=2, logprobs=scripted_prompt_logprobs(start)[1:])
        worker.report(worker_pb2.Report(prompt_logprobs=[part]))
        worker.tokens(start.room, 0, [100])

    split.script(forgets, by_the_book)
    code, failure = await failure_of(split.call(ask(sampling=greedy(prompt_logprobs=1))))
    assert (code, failure.cause, failure.origin) == (grpc.StatusCode.INTERNAL, "tokens_lost", common_pb2.ORIGIN_PREFILL)
    await split.settled()


async def test_a_room_that_goes_on_elsewhere_tells_them_once(stack_of: StackOf) -> None:
    """One that failed before its first token is asked again; one behind it is not."""
    stack: Stack = await stack_of(prefill=2, decode=2)
    await eventually(lambda: len(stack.gateway.fleet.routes) == 4)
    failed = []

    async def fails_first(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        if len(failed) < 1:
            failed.append(start)
            worker.prompt_logprobs(start)
            worker.fail(start.room, grpc.StatusCode.INTERNAL, "scripted")
        else:
            await by_the_book(worker, start)

    stack.script(fails_first, by_the_book)
    reply = await stack.reply(ask(sampling=greedy(prompt_logprobs=1)))
    said = [one for message in reply.messages for one in message.prompt_logprobs]
    assert said == scripted_prompt_logprobs(failed[0])
    assert reply.last.report.failed_attempts
    await stack.settled()
