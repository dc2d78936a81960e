"""How fast an engine computes prompts, from its own last steps. Pure."""

from __future__ import annotations

#: Shorter pieces tell what a step costs, not what a token of it does.
MIN_TOKENS = 16

#: Tokens after which a step counts half as much as the newest one.
HALF_LIFE_TOKENS = 8192


class PromptSpeed:
    """A mean over the last steps that computed prompts, weighted by their tokens. What else such a step did is part of its time."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 while nothing was measured."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def note(self, num_tokens: int, took_s: float) -> None:
        """A step computed `num_tokens` of prompts."""
        if num_tokens < MIN_TOKENS or took_s <= 0:
            return
        kept = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        self._tokens = self._tokens * kept + num_tokens
        self._seconds = self._seconds * kept + took_s
