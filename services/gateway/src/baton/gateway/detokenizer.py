"""Token ids to text, piece by piece, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

#: What a decoder writes for bytes that are no character (yet).
_REPLACEMENT = "\ufffd"

#: Ids kept as context when the window moves on: decoders look at a few neighbours.
_CONTEXT_IDS = 8

#: A character needs at most 4 tokens of one byte. A longer tail of replacement characters is no character in the making.
_MAX_HELD_IDS = 16


class Detokenizer:
    """One answer's text. `decode` is the tokenizer's own, special tokens skipped.

    Only a window of the last ids is decoded. It begins where no character was incomplete, so that its text is the tail of the whole text.

    Everything that `feed` and `flush` return, joined, is what `decode` makes of all ids at once, as long as the ids spell valid UTF-8; with a
    byte-level decoder also when they do not. (A byte-fallback decoder rewrites a whole run of bytes when its end turns out to be invalid.)
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_emitted = 0  # characters of decode(window) that were returned
        self._num_held = 0  # ids since nothing was held back
        self._mark = 0  # a place in the window before which nothing was held back

    def feed(self, token: int) -> str:
        """What this token completes; empty while a character is incomplete."""
        self._window.append(token)
        self._num_held += 1
        text = self._decode(self._window)
        stable = self._stable_length(text)
        piece = text[self._num_emitted : stable]
        self._num_emitted = max(self._num_emitted, stable)
        if stable == len(text):
            self._num_held = 0
            self._move_on()
        elif len(self._window) > 8 * _CONTEXT_IDS:
            self._move_on_in_garbage()
        return piece

    def flush(self) -> str:
        """What was held back: an incomplete character comes out as replacement characters, as it does in a whole decode."""
        text = self._decode(self._window)
        piece = text[self._num_emitted :]
        self._num_emitted = len(text)
        return piece

    def _stable_length(self, text: str) -> int:
        """Replacement characters at the end may become a character with the next token: the whole run of them, at first, because a byte-fallback
        decoder writes one a byte; only the last one, when the run is longer than any character."""
        if self._num_held <= _MAX_HELD_IDS:
            return len(text.rstrip(_REPLACEMENT))
        return len(text) - text.endswith(_REPLACEMENT)

    def _move_on(self) -> None:
        """Nothing is held back: forgets what lies before the mark, if enough context lies behind it."""
        if len(self._window) - self._mark >= _CONTEXT_IDS:
            self._window = self._window[self._mark :]
            self._mark = len(self._window)
            self._num_emitted = len(self._decode(self._window))

    def _move_on_in_garbage(self) -> None:
        """A long run of bytes that are no characters; only its last replacement character is held back, and the last few ids spell that."""
        self._window = self._window[-_CONTEXT_IDS:]
        self._mark = 0
        text = self._decode(self._window)
        self._num_emitted = len(text) - text.endswith(_REPLACEMENT)
