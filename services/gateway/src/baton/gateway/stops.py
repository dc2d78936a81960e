"""Stop strings in a stream of text: found also where they straddle pieces, never half streamed."""

from __future__ import annotations

from collections.abc import Sequence


class _Needle:
    """One stop string and how much of it the text ends with (Knuth-Morris-Pratt: each character is looked at once)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = _fallbacks(text)

    def step(self, char: str) -> bool:
        """True when the stop string ends with this character."""
        matched = self.num_matched
        while matched and self.text[matched] != char:
            matched = self._fallback[matched - 1]
        if self.text[matched] == char:
            matched += 1
        found = matched == len(self.text)
        self.num_matched = self._fallback[matched - 1] if found else matched
        return found


def _fallbacks(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table


class StopMatcher:
    """Holds back the longest tail that may still become a stop string.

    The answer is cut before the stop string that is complete first; of several that end with the same character, before the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._needles = [_Needle(stop) for stop in stops]
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """What of the text can be streamed now. Once `found` is set, the answer is over: nothing more comes out."""
        if not self._needles or self.found is not None:
            return "" if self.found is not None else piece
        text = self._held + piece
        for index in range(len(self._held), len(text)):
            hits = [needle.text for needle in self._needles if needle.step(text[index])]
            if hits:
                self.found = max(hits, key=len)
                self._held = ""
                return text[: index + 1 - len(self.found)]
        keep = max(needle.num_matched for needle in self._needles)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The answer ends without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held
