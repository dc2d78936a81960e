"""What a chat's answer is made of: thinking, text, calls. Pure."""

from __future__ import annotations

from dataclasses import replace

from baton.gateway.answer import Piece
from baton.gateway.reasoning import ReasoningSplit
from baton.gateway.tools.parser import CallParser


class AnswerSplit:
    """Of one answer. Either part may be missing."""

    def __init__(self, reasoning: ReasoningSplit | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def apply(self, piece: Piece, *, is_last: bool) -> Piece:
        """The same piece, taken apart; the last one has what was held back as well."""
        thought, text = ("", piece.text) if self._reasoning is None else self._reasoning.feed(piece.text)
        if is_last and self._reasoning is not None:
            more, rest = self._reasoning.finish()
            thought, text = thought + more, text + rest
        if self._calls is None:
            return replace(piece, text=text, reasoning=thought)
        said = self._calls.feed(text)
        if is_last:
            rest_said = self._calls.finish()
            said.text += rest_said.text
            said.calls += rest_said.calls
        return replace(piece, text=said.text, reasoning=thought, calls=said.calls)
