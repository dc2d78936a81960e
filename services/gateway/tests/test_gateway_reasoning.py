"""What a model thinks is told apart from what it answers, wherever its tokens cut the marks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_harness import MODEL, greedy, start_stack
from gateway_model import make_model_folder

from baton.gateway.reasoning import ReasoningSplit, thinks

#: (the answer, whether the prompt has begun to think, what was thought, what was said).
TEXTS = [
    ("<think>\nI see\n\n 2 < 3 </thin </think>\n\nYes </think> no", False, "I see\n\n 2 < 3 </thin", "Yes </think> no"),
    ("I see\n</think>\n\nYes", True, "I see", "Yes"),
    ("  \n<think>a</think>b", False, "a", "b"),
    ("<think></think>b", False, "", "b"),
    ("Hello <think>x</think>", False, "", "Hello <think>x</think>"),
    ("<thinker> x", False, "", "<thinker> x"),
    ("<think>never ends </thi", False, "never ends </thi", ""),
    ("<thi", False, "", "<thi"),
    ("  ", False, "", "  "),
]


@pytest.mark.parametrize(("text", "begun", "thought", "said"), TEXTS)
def test_however_the_text_is_cut(text: str, begun: bool, thought: str, said: str) -> None:
    for seed in range(25):
        rng, split, place = random.Random(seed), ReasoningSplit(begun=begun), 0
        parts = []
        while place < len(text):
            size = rng.randint(1, 6) if seed else len(text)
            parts.append(split.feed(text[place : place + size]))
            place += size
        parts.append(split.finish())
        assert ("".join(part for part, _ in parts), "".join(part for _, part in parts)) == (thought, said)


def test_a_template_that_says_nothing_turns_nothing_on() -> None:
    assert thinks("{{ message.content.split('</think>')[-1] }}")
    assert not thinks("{{ message.content }}")
    assert not thinks(None)


TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
OPENING"""
USER = {"role": "user", "content": "hello"}


def client_of(stack: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0, timeout=20)


def parts_of(message: Any) -> tuple[str | None, str | None]:
    return getattr(message, "reasoning_content", None), message.content


async def said_by(stack: Any) -> list[tuple[str | None, str | None]]:
    """(thought, said): whole, streamed, over gRPC."""
    async with client_of(stack) as client:
        request: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 64}
        whole = (await client.chat.completions.create(**request)).choices[0].message
        thought, said = "", ""
        async for chunk in await client.chat.completions.create(**request, stream=True):
            now_thought, now_said = parts_of(chunk.choices[0].delta)
            assert not {"<", ">"} & {*(now_thought or ""), *(now_said or "")}, "a part of a mark was streamed"
            thought, said = thought + (now_thought or ""), said + (now_said or "")
    reply = await stack.chat("hello", sampling=greedy(max_tokens=64))
    return [parts_of(whole), (thought, said), ("".join(message.reasoning for message in reply.messages), reply.text)]


@pytest.mark.parametrize(("opening", "answer"), [("", "<think>\nI weigh\n</think>\n\nforty two"), ("<think>\n", "I weigh\n</think>\n\nforty two")])
async def test_over_both_fronts(tmp_path: Path, opening: str, answer: str) -> None:
    """Also where the template itself has begun to think. An answer held to a grammar is no thinking; the template gets that of earlier turns."""
    folder = make_model_folder(tmp_path / "tiny", TEMPLATE.replace("OPENING", opening))
    async with start_stack(folder, answer=answer) as stack:
        assert await said_by(stack) == [("I weigh", "forty two")] * 3
        async with client_of(stack) as client:
            earlier: Any = [USER, {"role": "assistant", "content": "one", "reasoning_content": "hm"}, USER]
            await client.chat.completions.create(model=MODEL, messages=earlier, max_tokens=64)
            prompt = stack.tokenizer._tokenizer.decode(stack.prefill.starts[-1].prompt_token_ids, skip_special_tokens=False)
            assert "<think>hm</think>one<|im_end|>" in prompt
            request: Any = {"model": MODEL, "messages": [USER], "max_tokens": 64, "extra_body": {"structured_outputs": {"regex": "(.|\n)+"}}}
            assert parts_of((await client.chat.completions.create(**request)).choices[0].message) == (None, answer)
        await stack.settled()


async def test_off_unless_somebody_says_so(model_folder: Path) -> None:
    answer = "<think>a</think>b"
    async with start_stack(model_folder, answer=answer) as stack, client_of(stack) as client:
        request: Any = {"model": MODEL, "messages": [USER], "max_tokens": 64}
        assert parts_of((await client.chat.completions.create(**request)).choices[0].message) == (None, answer)
    async with start_stack(model_folder, answer=answer, reasoning_format="think") as stack:
        assert await said_by(stack) == [("a", "b")] * 3
