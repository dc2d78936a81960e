"""The fewest tokens that a text can have: never more than it has, and near enough to refuse what is hopeless."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_model import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from baton.gateway.body_limits import MOST_BYTES, body_limits
from baton.gateway.token_bound import TokenBound, token_bound

TEXT = ["the quick brown fox", "hello world     and     spaces", "日本語のテキスト", "naïve café ΐ", "aaaaaaaa bbbb //////// --------"]


def definition(tokenizer: Tokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def byte_level(**added: bool) -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|eats|>", **added)] if added else [])
    return tokenizer


def nfc() -> Tokenizer:
    """As Qwen's."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    tokenizer.add_tokens([AddedToken("がé", normalized=True), AddedToken("é" * 12, normalized=True), AddedToken("e\u0301>", normalized=False)])
    return tokenizer


def few_bytes() -> Tokenizer:
    """A byte-level vocabulary that cannot spell every byte: what it cannot spell vanishes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.train_from_iterator(["abc abc abcabc"] * 3, trainers.BpeTrainer(vocab_size=20, show_progress=False))
    return tokenizer


def spelt(fallback: bool) -> Tokenizer:
    """As Llama 2's and Gemma's: characters, spaces written as a mark; what is unknown is bytes, or one token however long it is."""
    alphabet = sorted({char for text in TEXT[:2] for char in text.replace(" ", "▁")} | {"▁"})
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256) if fallback), "<unk>", *alphabet, "▁▁", "▁▁▁▁", "th", "he", "ll", "▁th"]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("t", "h"), ("h", "e"), ("l", "l"), ("▁", "th")]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = spelt(True)
    tokenizer.normalizer = None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    return tokenizer


def cut() -> Tokenizer:
    """As Llama 3's and DeepSeek's."""
    tokenizer = byte_level()
    splits = [pre_tokenizers.Split(Regex(r"\s+|\p{L}+"), "isolated"), pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)  # type: ignore[assignment]
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "takes white space to its left": lambda: byte_level(lstrip=True),
    "takes white space to its right": lambda: byte_level(rstrip=True),
    "nfc": nfc,
    "few bytes": few_bytes,
    "characters, bytes": lambda: spelt(True),
    "characters, unknown": lambda: spelt(False),
    "metaspace": metaspace,
    "cut": cut,
}
BOUNDS = {name: (tokenizer := make(), token_bound(definition(tokenizer))) for name, make in TOKENIZERS.items()}

#: Each of them is what some tokenizer makes little of.
PIECES = [
    *(
        "<|im_start|>",
        "<|endoftext|>",
        "<|eats|>",
        "the quick",
        " ",
        "  ",
        " " * 64,
        "\u3000",
        "\n\n",
        "▁",
        "▁▁▁▁",
        "a",
        "abc",
        "z",
        "日本語",
        "\x00",
    ),
    *("e\u0301", "e\u0301>", "é", "がé", "か\u3099", "\u1fbe\u0308\u0301", "<|endoftext|>\u0338", "\u212a", "\u0301", "각", "\u1100\u1161\u11a8"),
    *("e\u0301" * 12, "é" * 12),
    *("\U0001f642", "/" * 40, "-", "\ud7ff", "\u0344", "1234567"),
]
texts = st.lists(st.tuples(st.sampled_from(PIECES) | st.text(max_size=3), st.integers(1, 60)), max_size=6).map(
    lambda parts: "".join(piece * count for piece, count in parts)
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(text=texts)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer, bound = BOUNDS[name]
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert bound.fewest(text) <= num_tokens
    most = bound.most_bytes(num_tokens)
    assert most is None or len(text.encode()) <= most


@pytest.mark.parametrize("name", TOKENIZERS)
def test_seams_between_pieces_cost_no_text_its_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces so short that most of what composes is cut through."""
    monkeypatch.setattr("baton.gateway.token_bound._PIECE_CHARS", 5)
    tokenizer, bound = BOUNDS[name]
    for piece in PIECES:
        for text in (piece * 50, f"x{piece}" * 50, f"\u0301{piece}" * 50):
            assert bound.fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("takes white space to its left", " \n\u3000" * 5000 + "<|eats|>"),
        ("takes white space to its right", "<|eats|>" + " \n\u3000" * 5000),
        ("nfc", "e\u0301" * 12 * 200),
        ("few bytes", "a" + "z" * 5000),
        ("characters, unknown", "日本語" * 5000),
    ],
)
def test_much_text_that_is_few_tokens(name: str, text: str) -> None:
    tokenizer, bound = BOUNDS[name]
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert num_tokens <= 200
    assert bound.fewest(text) <= num_tokens


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in TOKENIZERS for text in ("the quick ", "abc")])
def test_what_is_hopeless_is_seen(name: str, text: str) -> None:
    """Within a factor of the longest token."""
    tokenizer, bound = BOUNDS[name]
    assert not bound.reason
    long = text * 20_000
    num_tokens = len(tokenizer.encode(long, add_special_tokens=False).ids)
    if not num_tokens:  # nothing of it is in this vocabulary
        assert bound.fewest(long) == 0
    else:
        assert num_tokens / 24 <= bound.fewest(long) <= num_tokens


def test_decomposed_text_is_no_way_around_it() -> None:
    tokenizer, bound = BOUNDS["nfc"]
    for text in ("cafe\u0301 and then " * 20_000, "か\u3099" * 100_000):
        assert not unicodedata.is_normalized("NFC", text)
        assert 1000 < bound.fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_the_real_models_bound_is_near_what_is_true(real_model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(real_model_folder / "tokenizer.json"))
    bound = token_bound(json.loads((real_model_folder / "tokenizer.json").read_text()))
    assert not bound.reason
    spaces = " " * 64 * 100  # a token of it
    assert len(tokenizer.encode(spaces, add_special_tokens=False).ids) == 100
    assert 50 <= bound.fewest(spaces) <= 100
    for other in (
        "hello " * 5000,
        "Ein längerer Satz, auf Deutsch. " * 500,
        "日本語のテキスト" * 500,
        "def f(x):\n        return x\n" * 500,
        "🙂" * 500,
    ):
        num_tokens = len(tokenizer.encode(other, add_special_tokens=False).ids)
        assert num_tokens / 40 <= bound.fewest(other) <= num_tokens


@settings(max_examples=200)
@given(text=texts)
def test_the_real_model_too(real_model_folder: Path, text: str) -> None:
    tokenizer, bound = _real(real_model_folder)
    assert bound.fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def _real(folder: Path, _kept: dict[Path, tuple[Tokenizer, TokenBound]] = {}) -> tuple[Tokenizer, TokenBound]:  # noqa: B006 # read once
    if folder not in _kept:
        _kept[folder] = (Tokenizer.from_file(str(folder / "tokenizer.json")), token_bound(json.loads((folder / "tokenizer.json").read_text())))
    return _kept[folder]


def with_normalizer(normalizer: Any) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    return tokenizer


def with_pre_tokenizer(pre_tokenizer: Any) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: with_normalizer(normalizers.StripAccents()), "StripAccents"),
        (lambda: with_normalizer(normalizers.Sequence([normalizers.Prepend("x"), normalizers.NFC()])), "NFC"),
        (lambda: with_normalizer(normalizers.Replace(Regex(" +"), " ")), "replaces"),
        (lambda: with_normalizer(normalizers.Replace("ab", "")), "replaces"),
        (lambda: with_pre_tokenizer(pre_tokenizers.Whitespace()), "Whitespace"),
        (lambda: with_pre_tokenizer(pre_tokenizers.Split(" ", "removed")), "Split"),
        (lambda: Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), "WordLevel"),
        (lambda: Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), "WordPiece"),
    ],
)
def test_a_tokenizer_that_can_let_text_vanish_has_no_bound_and_says_why(make: Callable[[], Tokenizer], word: str) -> None:
    bound = token_bound(definition(make()))
    assert word in bound.reason
    assert bound.fewest("hello " * 1000) == 0
    assert bound.most_bytes(5) is None


def test_a_body_may_have_what_the_longest_prompt_can_need() -> None:
    bound = TokenBound([64] * 256)
    assert body_limits(None, 8192, bound).num_bytes == 2**20 + 6 * 64 * 8192
    assert body_limits(None, 10**6, bound).num_bytes == MOST_BYTES
    assert body_limits(None, None, bound).num_bytes == MOST_BYTES
    assert body_limits(None, 8192, TokenBound([0] * 256, reason="no bound")).num_bytes == MOST_BYTES
    assert body_limits(5000, 8192, bound).num_bytes == 5000
    assert body_limits(None, 8192, bound).num_values == body_limits(5000, 8192, bound).num_values == 16_384 + 9 * 8192
