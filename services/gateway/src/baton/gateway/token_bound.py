"""The fewest tokens that a text can have: milliseconds of counting, where tokenising a hopelessly long text takes seconds and gigabytes. Pure.

A token stands for a bounded number of the text's bytes. If no token that holds the byte b stands for more than m(b) bytes, then a token's bytes weigh
at most 1 together when each weighs 1/m(b), and the text's weight is at most its number of tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

#: Of a text that is counted in one go, between two of which other threads run.
_PIECE_CHARS = 65_536
#: A character and the marks that a seam between two pieces kept from composing with it are at most as many bytes.
_SEAM_BYTES = 16
#: A character of NFC stands for at most as many times its bytes; the worst are 3.5 (U+0390 as U+1FBE U+0308 U+0301).
_NFC_SHRINKS = 4

#: What `\s` is to an added token that takes the white space around it.
_WHITE_SPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"

#: Pre-tokenizers that only cut: what they let fall, if told to, is `_DROPS`.
_CUTS = ("Digits", "UnicodeScripts", "Split", "Punctuation")
_DROPS = "Removed"


class TokenBound:
    """longest_bytes: what one token can stand for at most, in bytes of UTF-8. reason: why this tokenizer has no bound, empty if it has one."""

    def __init__(self, covered: Sequence[int], *, composes: bool = False, longest_bytes: int = 0, reason: str = "") -> None:
        """covered: m(b) of the 256 bytes, 0 for those that may be in no token at all. composes: texts become NFC before they are cut."""
        self.reason = reason
        self._composes = composes
        self._longest = max(longest_bytes, *covered)
        self.longest_bytes = self._longest * (_NFC_SHRINKS if composes else 1)
        self._weighs_all = all(covered[byte] for byte in _UTF8)
        steps: dict[int, list[int]] = {}
        for byte, most in enumerate(covered):
            if most:
                steps.setdefault(_step(most), []).append(byte)
        self._classes = [(bytes(members), most) for most, members in sorted(steps.items(), reverse=True)]

    def fewest(self, text: str) -> int:
        """The text has at least as many tokens, special ones that are added to it not counted."""
        weight = 0.0
        for start in range(0, len(text) if self._classes else 0, _PIECE_CHARS):
            weight += self._weight(text[start : start + _PIECE_CHARS])
        return max(0, int(weight))

    def _weight(self, piece: str) -> float:
        if piece.isascii() or not self._composes:
            return self._weigh(piece.encode("utf-8", "surrogatepass"))
        if unicodedata.is_normalized("NFC", piece):
            return self._weigh(piece.encode("utf-8", "surrogatepass")) - _SEAM_BYTES
        # A mark does not compose with the end of an added token, as it does here: what is not ASCII gets the least weight that there is.
        composed = unicodedata.normalize("NFC", piece)
        plain = composed.encode("ascii", "ignore")
        others = len(composed.encode("utf-8", "surrogatepass")) - len(plain)
        return self._weigh(plain) + (others / self._longest if self._weighs_all else 0.0) - _SEAM_BYTES

    def most_bytes(self, num_tokens: int) -> int | None:
        """A text of more bytes has more tokens than that, whatever it says; None: that is not certain of any length."""
        return num_tokens * self.longest_bytes if self._weighs_all else None

    def _weigh(self, raw: bytes) -> float:
        weight = 0.0
        for members, most in self._classes:
            rest = raw.translate(None, members)
            weight += (len(raw) - len(rest)) / most
            raw = rest
            if not raw:
                break
        return weight


def token_bound(definition: Mapping[str, Any]) -> TokenBound:
    """definition: a tokenizer.json. A tokenizer of which it is not certain how much a token can stand for gets a bound that bounds nothing."""
    try:
        return _Reading(definition).bound()
    except _NoBoundError as why:
        return TokenBound([0] * 256, reason=str(why))


class _NoBoundError(Exception):
    """A part of a tokenizer that may let any amount of text vanish, or that is not known here."""


class _Reading:
    """How a tokenizer.json says that text becomes tokens, as far as it matters here."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        self._byte_level = self._composes = False
        #: What stands in tokens -> what stands for it in texts: one character each.
        self._swaps: dict[str, str] = {}
        for number, part in enumerate(_parts(definition.get("normalizer"), "normalizers")):
            self._normalizer(number, part)
        for part in _parts(definition.get("pre_tokenizer"), "pretokenizers"):
            self._pre_tokenizer(part)
        if self._swaps and (self._byte_level or len(self._swaps) > 1):
            raise _NoBoundError(f"it replaces characters: {self._swaps}")
        self._added = definition.get("added_tokens") or []
        self._model = definition.get("model") or {}
        if self._model.get("type", "BPE") != "BPE" or self._model.get("continuing_subword_prefix") or self._model.get("end_of_word_suffix"):
            raise _NoBoundError(f"its model is of type {self._model.get('type')}, or marks parts of words")

    def _normalizer(self, number: int, part: Mapping[str, Any]) -> None:
        kind = part.get("type")
        pattern, content = part.get("pattern"), part.get("content")
        if kind == "NFC" and number == 0:
            self._composes = True
        elif kind == "Replace" and isinstance(pattern, dict) and isinstance(content, str):
            self._swap(pattern.get("String", ""), content)
        elif kind == "ByteLevel":
            self._byte_level = True
        elif kind != "Prepend":
            raise _NoBoundError(f"its normalizer has a part of type {kind}")

    def _pre_tokenizer(self, part: Mapping[str, Any]) -> None:
        kind = part.get("type")
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "Metaspace":
            self._swap(" ", part.get("replacement", ""))
        elif kind not in _CUTS or part.get("behavior") == _DROPS:
            raise _NoBoundError(f"its pre-tokenizer has a part of type {kind} that may leave characters out")

    def _swap(self, before: str, after: str) -> None:
        known = self._swaps.get(after, before)
        if len(before) != 1 or len(after) != 1 or known != before or before in self._swaps or after in self._swaps.values():
            raise _NoBoundError(f"it replaces {before!r} with {after!r}")
        self._swaps[after] = before

    def bound(self) -> TokenBound:
        tokens = sorted(self._tokens(), key=lambda token: token[0], reverse=True)
        covered = [0] * 256
        left = set(range(256))
        for most, held in tokens:  # the longest first: it is the longest for all that it holds and no longer one did
            for byte in left.intersection(held):
                covered[byte] = most
            left.difference_update(held)
        longest = max(covered)
        known = self._known()
        covered = [(covered[byte] or 1) if byte in known else 0 for byte in range(256)]
        return TokenBound(covered, composes=self._composes, longest_bytes=longest)

    def _tokens(self) -> Iterator[tuple[int, bytes]]:
        """Of each token the most bytes that it can stand for, and the bytes that may be among them."""
        for text in self._model.get("vocab") or {}:
            if not self._byte_level:
                yield from self._spelt(text)
            elif all(char in _BYTES for char in text):
                yield len(text), bytes(_BYTES[char] for char in text)
        for token in self._added:
            yield from self._spelt(token["content"])
            if self._composes:
                yield from self._spelt(unicodedata.normalize("NFC", token["content"]))

    def _spelt(self, text: str) -> Iterator[tuple[int, bytes]]:
        raw = text.encode("utf-8", "surrogatepass")
        swapped = text
        for after, before in self._swaps.items():
            swapped = swapped.replace(after, before)
        other = swapped.encode("utf-8", "surrogatepass")
        yield max(len(raw), len(other)), raw + other

    def _known(self) -> set[int]:
        """Bytes that are always in a token. What the vocabulary cannot spell is left out, or any amount of it becomes one token."""
        vocab = self._model.get("vocab") or {}
        if self._byte_level:
            known = {byte for char, byte in _BYTES.items() if char in vocab}
        elif self._model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
            known = set(range(256))
        else:
            after = {before: after for after, before in self._swaps.items()}
            known = {byte for byte in range(128) if after.get(chr(byte), chr(byte)) in vocab}
        if any(token.get("lstrip") or token.get("rstrip") for token in self._added):
            known.difference_update(_WHITE_SPACE.encode())
        return known


def _parts(part: Mapping[str, Any] | None, inside: str) -> Iterator[Mapping[str, Any]]:
    """A component's parts in their order, however deep they are nested."""
    if part is None:
        return
    if part.get("type") == "Sequence":
        for one in part.get(inside) or []:
            yield from _parts(one, inside)
    else:
        yield part


def _step(most: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, ...: the next that is not below. Few classes of bytes are few passes over a text."""
    double = 1 << (most - 1).bit_length()
    return double * 3 // 4 if most <= double * 3 // 4 else double


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies, as GPT-2 chose them."""
    plain = [*_range("!", "~"), *_range("\u00a1", "\u00ac"), *_range("\u00ae", "\u00ff")]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _range(first: str, last: str) -> Iterable[int]:
    return range(ord(first), ord(last) + 1)


_BYTES = _byte_alphabet()
#: Bytes that a text can have.
_UTF8 = tuple(byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5)
