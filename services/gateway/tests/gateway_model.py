"""A tiny tokenizer in a Hugging Face folder: every byte is a token, some words are."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

#: Plain turns, a default system message, and the usual filters, so that rendering differs when any of them is wrong.
CHAT_TEMPLATE = """{%- if messages[0]['role'] != 'system' -%}
    {{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'tool' -%}
        {{ raise_exception('no tools here') }}
    {%- endif -%}
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2

_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, how are you today?",
    "the answer is forty two",
    "日本語のテキスト",
    "naïve café",
]


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    return tokenizer


def make_model_folder(path: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    path.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "clean_up_tokenization_spaces": False}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": EOS}
    (path / "config.json").write_text(json.dumps(config))
    return path
