"""Short texts are tokenised on the event loop, long ones on a thread, by two calls of the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.gateway.errors import SurrogateError
from baton.gateway.model_folder import read_model_folder
from baton.gateway.requests import TextPrompt
from baton.gateway.tokenizer import MAX_INLINE_CHARS, PromptTokenizer


@pytest.mark.parametrize("num_chars", [1, MAX_INLINE_CHARS, MAX_INLINE_CHARS + 1])
async def test_both_ways_give_the_same_ids_and_the_same_refusal(model_folder: Path, num_chars: int) -> None:
    folder = read_model_folder(model_folder)
    tokenizer = PromptTokenizer(folder)
    try:
        text = ("the answer is forty two " * num_chars)[:num_chars]
        assert await tokenizer.encode(TextPrompt(text, "prompt")) == folder.tokenizer.encode_batch([text])[0].ids
        with pytest.raises(SurrogateError, match="prompt has the lone surrogate"):
            await tokenizer.encode(TextPrompt(text[:-1] + "\ud800", "prompt"))
    finally:
        tokenizer.close()
