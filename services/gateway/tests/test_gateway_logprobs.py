"""Log probabilities, penalties, bias, echo and the tokenizer's two paths, through both fronts and a real client, before scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from gateway_harness import MODEL, Stack, ask, greedy, says
from gateway_worker import ScriptedWorker, by_the_book, scripted_logprobs
from tokenizers import Tokenizer, decoders, models

from baton.gateway.continuation import continued
from baton.gateway.token_bytes import TokenBytes
from baton.wire.v1 import worker_pb2

StackOf = Callable[..., Any]

ANSWER = "日本 says hello"
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def stack(stack_of: StackOf) -> Stack:
    made: Stack = await stack_of(answer=ANSWER)
    return made


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20) as one:
        yield one


async def test_a_chats_log_probabilities_streamed_and_whole(stack: Stack, client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": USER, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    entries = whole.choices[0].logprobs.content
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == entries
    tokens = says(stack.tokenizer, ANSWER)
    assert [entry.logprob for entry in entries] == pytest.approx([-token / 1000 for token in tokens])
    # One for each token of the answer, its end of sequence too; the bytes of parts of characters join to the text.
    assert len(entries) == whole.usage.completion_tokens == len(tokens)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == ANSWER + "<|im_end|>"
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(tokens)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    plainly = await client.chat.completions.create(model=MODEL, messages=USER, temperature=0)
    assert plainly.choices[0].logprobs is None
    await stack.settled()


async def test_a_completions_log_probabilities(stack: Stack, client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "hello", "temperature": 0, "logprobs": 1, "max_tokens": 64, "stop": " hello"}
    whole = (await client.completions.create(**asked)).choices[0]
    chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts for one in getattr(part, field)] == getattr(whole.logprobs, field)
    offsets = [sum(map(len, whole.logprobs.tokens[:count])) for count in range(len(whole.logprobs.tokens))]
    assert whole.logprobs.text_offset == offsets
    assert whole.text == "日本 says"


async def test_over_grpc_each_token_has_its_own(stack: Stack) -> None:
    reply = await stack.reply(ask(sampling=greedy(top_logprobs=3)))
    told = [said for message in reply.messages for said in message.logprobs]
    assert told == [scripted_logprobs(token, 3) for token in reply.ids]
    assert not [said for message in (await stack.reply()).messages for said in message.logprobs]


async def test_what_is_asked_reaches_both_servers(stack: Stack, client: Any) -> None:
    more = {"repetition_penalty": 1.2}
    bias = {"7": -100, "5": 2}
    await client.chat.completions.create(
        model=MODEL, messages=USER, presence_penalty=0.5, frequency_penalty=-0.25, logit_bias=bias, extra_body=more, max_tokens=64
    )
    for sampling in (stack.prefill.starts[-1].sampling, stack.decode.starts[-1].sampling):
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
        assert sampling.repetition_penalty == pytest.approx(1.2)
        assert (list(sampling.bias_token_ids), list(sampling.bias_values)) == ([5, 7], [2, -100])
        assert not sampling.HasField("top_logprobs")
    await stack.reply(ask(sampling=greedy(presence_penalty=1, logit_bias={9: 3.5})))
    sampling = stack.prefill.starts[-1].sampling
    assert (sampling.presence_penalty, list(sampling.bias_token_ids), list(sampling.bias_values)) == (1, [9], [3.5])
    assert sampling.repetition_penalty == 1.0


async def test_a_server_that_would_ignore_a_field_gets_no_such_request(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(answer=ANSWER, worker={"prefill": {"sampling_level": 0}})
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as raw:
        body = {"model": MODEL, "messages": USER, "max_tokens": 64}
        refused = await raw.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 2})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "top_logprobs"
        assert "older version" in refused.json()["error"]["message"]
        idle = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "logprobs": False}
        assert (await raw.post("/v1/chat/completions", json=body | idle)).status_code == 200
    await stack.settled()


async def test_tokens_without_their_log_probabilities_fail_the_room(stack: Stack) -> None:
    async def forgets(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        changed = worker_pb2.Start()
        changed.CopyFrom(start)
        del worker._asked[start.room]
        await by_the_book(worker, changed)

    stack.script(decode=forgets)
    with pytest.raises(Exception, match="without the log probabilities"):
        await stack.reply(ask(sampling=greedy(top_logprobs=0)))
    await stack.settled()


async def test_a_request_that_goes_on_elsewhere_keeps_its_log_probabilities(stack_of: StackOf) -> None:
    """Decode dies in the middle: another room goes on behind what it drew, which counts as answer there."""
    stack: Stack = await stack_of(answer=ANSWER, prefill=1, decode=2, kv_load_failure_policy="recompute")

    async def dies(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        answer = worker.shared.tokens(start)
        worker.event(start.room, reserved=worker_pb2.Reserved(pages=1))
        worker.event(start.room, kv_ready=worker_pb2.KvReady())
        worker.tokens(start.room, 1, answer[1:4])
        await worker.kill()

    stack.of("decode", 0).script = dies
    for _ in range(4):  # until one was sent to the server that dies
        reply = await stack.reply(ask(sampling=greedy(top_logprobs=1, presence_penalty=0.5)))
        ids, told = reply.ids, [said for message in reply.messages for said in message.logprobs]
        assert told == [scripted_logprobs(token, 1) for token in ids]
        assert ids == says(stack.tokenizer, ANSWER)
        if reply.last.report.failed_attempts:
            break
    else:
        raise AssertionError("no request was sent to the server that dies")
    later = [start.sampling.answered_tokens for worker in stack.workers for start in worker.starts if start.sampling.answered_tokens]
    assert later
    assert set(later) == {4}


def test_what_was_answered_counts_as_answer_behind_a_second_failure() -> None:
    from baton.gateway.admission import Admitted

    sampling = worker_pb2.Sampling(max_tokens=10, presence_penalty=1.0)
    once = continued(Admitted([1, 2], sampling, (), 1), [5, 6])
    assert once.sampling.answered_tokens == 2
    assert once.sampling_level == 1
    assert sampling.answered_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(stack: Stack, client: Any, stream: bool) -> None:
    for prompt in ("hello", says(stack.tokenizer, "hello")[:-1]):
        given: Any = await client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=64, temperature=0, stream=stream)
        text = "".join([chunk.choices[0].text async for chunk in given]) if stream else given.choices[0].text
        assert text == "hello" + ANSWER


async def test_tokenize_and_detokenize(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as raw:
        text = "hello 日本<|im_end|>"
        made = (await raw.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
        assert made["count"] == len(made["tokens"])
        assert made["max_model_len"] == 512
        back = await raw.post("/detokenize", json={"model": MODEL, "tokens": made["tokens"]})
        assert back.json() == {"prompt": text}
        chat = (await raw.post("/tokenize", json={"model": MODEL, "messages": USER})).json()
        await raw.post("/v1/chat/completions", json={"model": MODEL, "messages": USER, "max_tokens": 64})
        assert chat["tokens"] == list(stack.prefill.starts[-1].prompt_token_ids)
        for path, body, param in (
            ("tokenize", {"model": MODEL}, "prompt"),
            ("tokenize", {"model": MODEL, "prompt": "x", "messages": USER}, "prompt"),
            ("tokenize", {"model": "other", "prompt": "x"}, "model"),
            ("tokenize", {"model": MODEL, "prompt": "x" * 60_000}, "prompt"),
            ("detokenize", {"model": MODEL, "tokens": [5, 100_000]}, "tokens[1]"),
            ("detokenize", {"model": MODEL}, "tokens"),
        ):
            refused = await raw.post(f"/{path}", json=body)
            assert refused.status_code in (400, 404), body
            assert refused.json()["error"]["param"] == param


def test_the_bytes_of_tokens_of_a_sentencepiece_vocabulary() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581the": 0, "<0xE6>": 1, "é": 2}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    spell = TokenBytes(tokenizer)
    assert [spell(token) for token in range(4)] == [b" the", b"\xe6", "é".encode(), b""]
