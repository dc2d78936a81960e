"""What a model thinks before it answers, split from the answer as it comes: <think>...</think>, the marks never half streamed. Pure."""

from __future__ import annotations

from typing import Literal

BEGIN, END = "<think>", "</think>"


def thinks(template: str | None) -> bool:
    """Whether a chat template says that its model marks what it thinks."""
    return template is not None and END in template


class ReasoningSplit:
    """`feed` and `finish` give (reasoning, text). Thinking stands at the beginning of an answer, or the prompt has begun it: a mark anywhere else is
    text. White space around the marks belongs to neither part."""

    def __init__(self, *, begun: bool) -> None:
        """begun: the prompt ends inside of it."""
        self._state: Literal["before", "thinking", "behind", "text"] = "thinking" if begun else "before"
        self._held = ""
        self._skipping = begun  # white space at the beginning of a part

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        reasoning, said = "", ""
        if self._state == "before":
            self._look_for_begin()
        if self._state == "thinking":
            reasoning = self._think()
        if self._state == "behind":
            self._held = self._held.lstrip()
            self._state = "text" if self._held else "behind"
        if self._state == "text":
            said, self._held = self._held, ""
        return reasoning, said

    def finish(self) -> tuple[str, str]:
        """The answer ended: what was held back is what it looks like so far."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state == "thinking" else ("", held)

    def _look_for_begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(BEGIN):
            self._held, self._state, self._skipping = start[len(BEGIN) :], "thinking", True
        elif not BEGIN.startswith(start):
            self._state = "text"

    def _think(self) -> str:
        if self._skipping:
            self._held = self._held.lstrip()
            self._skipping = not self._held
        before, mark, behind = self._held.partition(END)
        if mark:
            self._held, self._state = behind, "behind"
            return before.rstrip()
        keep = next((count for count in range(min(len(END) - 1, len(before)), 0, -1) if END.startswith(before[-count:])), 0)
        whole = before[: len(before) - keep].rstrip()
        self._held = before[len(whole) :]
        return whole
