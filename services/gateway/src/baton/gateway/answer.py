"""From tokens to what the client reads: detokenised, cut at stop strings, stop tokens left out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.gateway.detokenizer import Decode, Detokenizer
from baton.gateway.stops import StopMatcher
from baton.gateway.tools.scanner import CallPart
from baton.wire.v1 import common_pb2, inference_pb2


@dataclass(slots=True)
class Piece:
    """A part of the answer. Its ids and its text need not spell the same: text waits for whole characters and for stop strings."""

    text: str
    token_ids: list[int]
    #: One for each of the ids, where they were asked for.
    logprobs: Sequence[inference_pb2.TokenLogprobs] = ()
    #: Which of the request's answers it belongs to, and why that one ends with it; None: it goes on.
    choice: int = 0
    #: Of a chat's answer: what was thought, and parts of calls; neither is in `text`.
    reasoning: str = ""
    calls: Sequence[CallPart] = ()
    finish: common_pb2.FinishReason.ValueType | None = None


class AnswerText:
    """One answer. `num_tokens` counts every token that belongs to it, the stop token or the one that completed a stop string included."""

    def __init__(self, decode: Decode, stops: Sequence[str], stop_token_ids: Iterable[int], min_tokens: int) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        # A stop token is text only if the answer goes on after it.
        self._held_token: int | None = None
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found: the answer is over, whatever the servers still send."""
        return self._matcher.found is not None

    def feed(self, tokens: Sequence[int]) -> Piece:
        """The part that these tokens bring; tokens after a stop string are not part of the answer."""
        text = ""
        taken = []
        for token in tokens:
            if self.stopped:
                break
            taken.append(token)
            self.num_tokens += 1
            text += self._add(token)
        return Piece(text, taken)

    def finish(self, *, by_stop_token: bool) -> str:
        """The rest of the text, once the servers have finished. `by_stop_token`: they stopped at one, and it is not text."""
        rest = ""
        if self._held_token is not None and not by_stop_token:
            rest = self._spell(self._held_token)
        self._held_token = None
        return rest + self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()

    def _add(self, token: int) -> str:
        held, self._held_token = self._held_token, None
        text = "" if held is None else self._spell(held)
        if token in self._stop_token_ids:
            self._held_token = token
            return text
        return text + self._spell(token)

    def _spell(self, token: int) -> str:
        piece = self._detokenizer.feed(token)
        # Stop strings count from the token that min_tokens allows to be the last.
        return self._matcher.feed(piece) if self.num_tokens >= self._min_tokens else piece
