"""The converted folder against transformers' own reading of the same GGUF file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from baton.cli.errors import ConversionError
from baton.cli.model.convert import convert_gguf, restore_rotary_order

AWKWARD = [
    "",
    " ",
    "the  theatre\t\n\n  the",
    "don't WE'RE I'll",
    "日本語 漢字 ไทย Привет",
    "😀👨‍👩‍👧‍👦 🇫🇷",
    "e\u0301 \u200b \u00a0 \U0010fffd",
    "<|im_start|>user\nthe<|im_end|>",
    "a\r\nb\x00\x7f",
]


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted")
    convert_gguf(tiny.gguf_file, target, lambda done: None)
    return target


@pytest.fixture(scope="module")
def reference(tiny: Any) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": tiny.gguf_file.parent, "gguf_file": tiny.gguf_file.name}


def test_weights_and_logits_are_those_of_the_gguf_file(folder: Path, reference: dict[str, Any]) -> None:
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**reference, dtype=torch.float32)
    state, wanted = ours.state_dict(), theirs.state_dict()
    assert state.keys() == wanted.keys()
    assert [name for name in state if not torch.equal(state[name], wanted[name])] == []
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert ours.config.tie_word_embeddings
    assert ours.generation_config.eos_token_id == 2


def test_tokenization_is_that_of_the_gguf_file_where_no_digit_is(folder: Path, reference: dict[str, Any]) -> None:
    ours, theirs = transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(**reference)
    assert [ours(text)["input_ids"] for text in AWKWARD] == [theirs(text)["input_ids"] for text in AWKWARD]
    assert [ours.decode(ours(text)["input_ids"]) for text in AWKWARD] == AWKWARD


def test_every_digit_is_a_token_of_its_own_and_no_space_is_joined_to_it(folder: Path) -> None:
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The vocabulary has a token "12" and a token for two spaces; transformers' GGUF reader, which knows no digit rule, would use "12".
    assert plain.encode("x12 3²").tokens == ["x", "1", "2", "Ġ", "3", "Â", "²"]
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    assert fast("x12 3²")["input_ids"] == plain.encode("x12 3²").ids


def test_special_tokens_and_chat_template(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert tokenizer.decode([1, 67, 2], skip_special_tokens=True) == tokenizer.decode([67])
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert rendered == "<|im_start|>user\nthe<|im_end|>\n"
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 512


def test_rotary_order_is_undone() -> None:
    """Row r of a head in Hugging Face order stands at 2r (first half) or 2(r - half) + 1 in GGUF order."""
    heads, half = 3, 4
    wanted = np.arange(heads * 2 * half, dtype=np.float32)[:, None]
    interleaved = np.concatenate([wanted[h * 8 + np.array([0, 4, 1, 5, 2, 6, 3, 7])] for h in range(heads)])
    assert np.array_equal(restore_rotary_order(interleaved, heads), wanted)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "qwen2"}, "'qwen2'"),
        ({"pre_tokenizer": "llama-bpe"}, "'llama-bpe'"),
        ({"extra_tensor": "blk.0.attn_q_norm.weight"}, r"blk\.0\.attn_q_norm\.weight"),
        ({"extra_tensor": "blk.2.attn_q.weight"}, r"model\.layers\.2\.self_attn\.q_proj"),
    ],
)
def test_what_is_not_known_is_refused_by_name(make_gguf: Callable[..., None], tmp_path: Path, changes: dict[str, str], named: str) -> None:
    make_gguf(tmp_path / "odd.gguf", **changes)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConversionError, match=named):
        convert_gguf(tmp_path / "odd.gguf", tmp_path / "out", lambda done: None)
