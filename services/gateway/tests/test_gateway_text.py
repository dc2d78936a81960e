"""From tokens to text: whole characters, stop strings, stop tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway_model import SPECIAL, make_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from baton.gateway.answer import AnswerText
from baton.gateway.detokenizer import Detokenizer
from baton.gateway.stops import StopMatcher

BYTE_LEVEL = make_tokenizer()
NUM_BYTE_LEVEL = BYTE_LEVEL.get_vocab_size()


def make_byte_fallback() -> Tokenizer:
    """As Llama's older tokenizers: words with a leading mark, bytes as <0x..> for what is no word."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁hello": 256, "▁world": 257, "▁": 258, "!": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_FALLBACK = make_byte_fallback()


def whole(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(lambda window: whole(tokenizer, window))
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


def byte_ids(text: bytes) -> list[int]:
    """One token a byte of the byte-level vocabulary."""
    return [BYTE_LEVEL.token_to_id(_byte_char(byte)) for byte in text]


def _byte_char(byte: int) -> str:
    """The character that byte-level tokenizers write for a byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))


# --- detokenisation


@settings(max_examples=300)
@given(st.lists(st.integers(0, NUM_BYTE_LEVEL - 1), max_size=120))
def test_any_ids_of_a_byte_level_tokenizer_give_the_whole_decode(ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == whole(BYTE_LEVEL, ids)


@settings(max_examples=200)
@given(st.binary(max_size=200))
@example(b"\xff" * 200)
@example("🙂".encode()[:3] * 60)
@example("é".encode() * 20 + b"\xf0\x9f\x99")
@example(b"a" * 40 + b"\xe4\xbd" + b"b" * 40)
def test_any_bytes_one_token_each_give_the_whole_decode(data: bytes) -> None:
    ids = byte_ids(data)
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == whole(BYTE_LEVEL, ids) == data.decode("utf-8", "replace")


TEXTS = st.text(st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from("🙂👍🏽日本語é\u200d ñ")), max_size=80)


@settings(max_examples=200)
@given(TEXTS)
def test_text_comes_out_whole_and_never_half_a_character(text: str) -> None:
    for ids in (BYTE_LEVEL.encode(text).ids, byte_ids(text.encode())):
        pieces = pieces_of(BYTE_LEVEL, ids)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(st.sampled_from([[256], [257], [259]]), st.characters(exclude_categories=("Cs",)).map(lambda c: list(c.encode()))), max_size=60
    )
)
def test_text_of_a_byte_fallback_tokenizer_comes_out_whole(groups: list[list[int]]) -> None:
    ids = [token for group in groups for token in group]
    pieces = pieces_of(BYTE_FALLBACK, ids)
    assert "".join(pieces) == whole(BYTE_FALLBACK, ids)
    if 0xEF not in ids:  # no replacement character was meant
        assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_no_text() -> None:
    ids = [*BYTE_LEVEL.encode("hello").ids, *(BYTE_LEVEL.token_to_id(text) for text in SPECIAL), *BYTE_LEVEL.encode(" world").ids]
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == "hello world"


def test_a_long_answer_costs_the_same_per_token() -> None:
    """The window is bounded, also in a long run of bytes that are no characters."""
    for ids in (byte_ids(b"abc \xf0\x9f\x99\x82" * 500), byte_ids(b"\xff" * 3000)):
        longest = 0

        def decode(window: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(window))
            return whole(BYTE_LEVEL, window)

        detokenizer = Detokenizer(decode)
        for token in ids:
            detokenizer.feed(token)
        assert longest <= 80


# --- stop strings


def naive_cut(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first, the longest of several; None when there is none."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return None


SMALL = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=500)
@given(st.lists(st.text("ab", max_size=5), max_size=20), STOPS)
def test_stop_strings_are_found_wherever_they_straddle_and_never_half_streamed(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = "".join(pieces)
    cut = naive_cut(text, stops)
    streamed = ""
    for piece in pieces:
        streamed += matcher.feed(piece)
        assert text.startswith(streamed)
        if cut is not None:
            assert cut.startswith(streamed)
    if cut is None:
        assert matcher.found is None
        assert streamed + matcher.flush() == text
    else:
        assert matcher.found in stops
        assert streamed == cut
        assert matcher.feed("ababab") == ""


@settings(max_examples=300)
@given(st.lists(st.text("ab", max_size=5), max_size=20), STOPS)
def test_no_more_is_held_back_than_a_stop_string_could_need(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    received = streamed = ""
    for piece in pieces:
        received += piece
        streamed += matcher.feed(piece)
        if matcher.found is None:
            held = received[len(streamed) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


# --- answers


def answer_of(stops: Sequence[str] = (), stop_ids: Sequence[int] = (2,), min_tokens: int = 0) -> AnswerText:
    return AnswerText(lambda ids: whole(BYTE_LEVEL, ids), stops, stop_ids, min_tokens)


def test_a_stop_token_is_counted_and_not_text() -> None:
    ids = BYTE_LEVEL.encode("hi!").ids
    bang = ids[-1]
    answer = answer_of(stop_ids=[bang])
    piece = answer.feed(ids)
    assert piece.text + answer.finish(by_stop_token=True) == "hi"
    assert piece.token_ids == ids
    assert answer.num_tokens == len(ids)


def test_a_stop_token_that_did_not_stop_is_text() -> None:
    ids = BYTE_LEVEL.encode("a!b!").ids
    answer = answer_of(stop_ids=[BYTE_LEVEL.token_to_id("!")])
    text = "".join(answer.feed([token]).text for token in ids)
    assert text + answer.finish(by_stop_token=False) == "a!b!"


def test_tokens_after_a_stop_string_are_no_part_of_the_answer() -> None:
    answer = answer_of(stops=["two"])
    ids = byte_ids(b"one two three")
    piece = answer.feed(ids)
    assert (piece.text, answer.stopped) == ("one ", True)
    assert piece.token_ids == byte_ids(b"one two")
    assert answer.num_tokens == 7
    assert answer.feed([5]).token_ids == []


def test_stop_strings_wait_for_min_tokens() -> None:
    answer = answer_of(stops=["b"], min_tokens=4)
    piece = answer.feed(byte_ids(b"abcdbe"))
    assert (piece.text, answer.stopped, answer.num_tokens) == ("abcd", True, 5)


def test_what_was_held_back_comes_out_at_the_end() -> None:
    answer = answer_of(stops=["STOP"])
    piece = answer.feed(byte_ids(b"do STO"))
    assert piece.text == "do "
    assert answer.finish(by_stop_token=False) == "STO"
    half = answer_of()
    piece = half.feed(byte_ids("é".encode()[:1]))
    assert piece.text == ""
    assert half.finish(by_stop_token=False) == "\ufffd"


def test_the_rest_of_the_text_may_complete_a_stop_string() -> None:
    answer = answer_of(stops=["x\ufffd"])
    assert answer.feed(byte_ids(b"wx\xe9")).text == "w"
    assert answer.finish(by_stop_token=False) == ""
    assert answer.stopped


def test_the_real_models_tokenizer_too(real_model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(real_model_folder / "tokenizer.json"))
    for text in ("The capital of France is Paris.\n", "日本語 🙂👍🏽 naïve café ", "def f(x):\n\treturn x ** 2  # ∑", "مرحبا بالعالم"):
        ids = tokenizer.encode(text).ids
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
