"""The bytes that one token stands for: a part of a character too, which no text can show."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")

#: Tokens whose bytes are remembered: common ones come again and again.
_REMEMBERED = 65_536


class TokenBytes:
    """Special tokens stand for their names. Tokens of a vocabulary that is padded beyond the tokenizer's stand for nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._byte_level = "ByteLevel" in _types(decoder)
        self.of = lru_cache(_REMEMBERED)(self._spell)

    def __call__(self, token: int) -> bytes:
        return self.of(token)

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in text)
        fallback = _FALLBACK.fullmatch(text)
        if fallback:
            return bytes([int(fallback[1], 16)])
        # As SentencePiece writes a space.
        return text.replace("\u2581", " ").encode()


def _types(decoder: Any) -> list[str]:
    """Of a decoder and of those that it is made of."""
    if isinstance(decoder, list):
        return [kind for inner in decoder for kind in _types(inner)]
    if not isinstance(decoder, dict):
        return []
    return [str(decoder.get("type")), *_types(list(decoder.values()))]


def _byte_alphabet() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones of Latin-1 as themselves, the others as characters from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()
