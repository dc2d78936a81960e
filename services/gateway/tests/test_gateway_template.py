"""Chat templates and prompts: equal to what transformers makes of the same folder."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from gateway_model import CHAT_TEMPLATE, make_model_folder
from tokenizers import Tokenizer, processors

from baton.gateway.chat_template import ChatTemplate
from baton.gateway.errors import ChatTemplateError, ModelFolderError, UnsupportedError
from baton.gateway.model_folder import read_model_folder
from baton.gateway.requests import ChatPrompt, TextPrompt, TokenPrompt
from baton.gateway.tokenizer import PromptTokenizer

USER = {"role": "user", "content": "  Hello, 日本 🙂!  "}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be kind."}, USER],
    [USER, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": '<|im_end|> & "quotes" <b>'}],
]

TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    # whitespace control, loop controls, namespaces, filters, special tokens by name
    "rich": """{{ bos_token }}
{% set ns = namespace(count=0, seen=dict(a=1)) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
[{{ ns.count }}] {{ message | tojson }} {{ message['content'] | length }}
{% endfor %}
{{ messages | map(attribute='role') | join(',') }}{{ eos_token }}{% if add_generation_prompt %}>{% endif %}
""",
    "generation": """{% for m in messages %}{% if m['role'] == 'assistant' %}
{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}
{{ m['content'] }}{% endif %}{% endfor %}""",
    "tools": "{% if tools %}T{% endif %}{% if documents is not none and documents %}D{% endif %}{{ tools is none }}{{ messages[-1]['content'] }}",
    "indent": "{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') }}",
}


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("name", TEMPLATES)
async def test_prompts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = make_model_folder(tmp_path / "m", TEMPLATES[name])
    theirs = reference(folder)
    ours = PromptTokenizer(read_model_folder(folder))
    template = ChatTemplate(read_model_folder(folder).chat_template, read_model_folder(folder).special_tokens)
    for conversation in CONVERSATIONS:
        assert template.render(conversation) == theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        expected = theirs.apply_chat_template(conversation, tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert await ours.encode(ChatPrompt(conversation)) == expected
    ours.close()


async def test_a_template_in_a_file_of_its_own_wins(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("own {{ messages[0]['content'] }}")
    theirs = reference(folder)
    conversation = [{"role": "user", "content": "x"}]
    read = read_model_folder(folder)
    assert ChatTemplate(read.chat_template, read.special_tokens).render(conversation) == "own x"
    assert theirs.apply_chat_template(conversation, tokenize=False) == "own x"


async def test_begin_of_sequence_is_added_to_texts_and_not_twice_to_chats(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", "{{ bos_token }}{{ messages[0]['content'] }}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    theirs = reference(folder)
    ours = PromptTokenizer(read_model_folder(folder))
    conversation = [{"role": "user", "content": "hello"}]
    text = await ours.encode(TextPrompt("hello", "prompt"))
    assert text == theirs("hello")["input_ids"]
    chat = await ours.encode(ChatPrompt(conversation))
    assert chat == theirs.apply_chat_template(conversation, return_dict=True)["input_ids"]
    assert chat == text
    assert chat.count(1) == 1
    assert await ours.encode(TextPrompt("", "prompt")) == []  # an empty text is an empty prompt
    assert await ours.encode(TokenPrompt([5, 6], "prompt")) == [5, 6]  # ids are taken as they are
    ours.close()


async def test_the_real_model_too(real_model_folder: Path) -> None:
    theirs = reference(real_model_folder)
    ours = PromptTokenizer(read_model_folder(real_model_folder))
    assert ours.eos_token_ids == (2,)
    for conversation in CONVERSATIONS:
        assert (
            await ours.encode(ChatPrompt(conversation))
            == theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
        for message in conversation:
            assert await ours.encode(TextPrompt(message["content"], "prompt")) == theirs(message["content"])["input_ids"]
    ours.close()


ESCAPES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ dict.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__x=1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ ('%s' | format(1)).__class__.mro() }}",
    "{{ '{0.__class__}'.format(messages) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_python_nor_change_the_messages(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        rendered = ChatTemplate(source, {}).render(messages)
    except (ChatTemplateError, ModelFolderError):
        return
    finally:
        assert messages == [{"role": "user", "content": "x"}]
    assert rendered == ""  # an undefined attribute


def test_what_a_template_says_against_the_messages_is_the_callers_mistake() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([USER])
    assert caught.value.field == "messages"
    for source in ("{{ messages[7]['content'] + 'x' }}", "{{ 1 / 0 }}", "{{ messages | tojson | int + none }}"):
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source, {}).render([USER])
    with pytest.raises(UnsupportedError, match="no chat template"):
        ChatTemplate(None, {}).render([USER])
    with pytest.raises(ModelFolderError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_folders_that_cannot_be_used_name_the_file(tmp_path: Path) -> None:
    for number, (name, content, words) in enumerate(
        [
            ("tokenizer.json", None, "is missing"),
            ("tokenizer.json", "{", "cannot be read"),
            ("config.json", None, "is missing"),
            ("config.json", "[]", "holds list"),
            ("config.json", "{", "is not JSON"),
            ("config.json", '{"eos_token_id": "x"}', "eos_token_id='x'"),
            ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is int"),
        ]
    ):
        folder = make_model_folder(tmp_path / str(number))
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_text(content)
        with pytest.raises(ModelFolderError) as caught:
            read_model_folder(folder)
        assert name in str(caught.value)
        assert words in str(caught.value)


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 8], (7, 8)), (None, (2,))])
def test_end_of_sequence_is_what_transformers_generate_stops_at(tmp_path: Path, value: Any, ids: tuple[int, ...]) -> None:
    folder = make_model_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert read_model_folder(folder).eos_token_ids == ids


async def test_a_long_prompt_does_not_hold_up_the_loop(real_model_folder: Path) -> None:
    """Half a million characters take long to tokenise; a beat on the same loop goes on meanwhile."""
    ours = PromptTokenizer(read_model_folder(real_model_folder))
    text = "The quick brown fox jumps over the lazy dog. " * 12_000
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.002)
            gaps.append(time.monotonic() - before)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0.02)
    began = time.monotonic()
    ids = await ours.encode(TextPrompt(text, "prompt"))
    took_s = time.monotonic() - began
    beating.cancel()
    assert len(ids) > 100_000
    assert max(gaps) < max(0.1, took_s / 2), f"a beat took {max(gaps):.3f} s of {took_s:.3f} s"
    assert len(gaps) > 5
    ours.close()
