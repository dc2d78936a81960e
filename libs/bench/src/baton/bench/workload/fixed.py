"""Prompts and answers of one length."""

from dataclasses import asdict, dataclass

from baton.bench.errors import require
from baton.bench.request import Message, Request
from baton.bench.text import generator, plain_text
from baton.bench.workload.base import LONG_WORDS, Description


@dataclass(frozen=True)
class FixedLengths:
    """Prompts of exactly `prompt_words` words, answers of at most `answer_tokens` tokens."""

    seed: int
    prompt_words: int = 512
    answer_tokens: int = 128

    def __post_init__(self) -> None:
        require(self.prompt_words >= 1, "prompt_words", self.prompt_words, "at least 1")
        require(self.answer_tokens >= 1, "answer_tokens", self.answer_tokens, "at least 1")

    @property
    def size(self) -> None:
        return None

    def request(self, index: int) -> Request:
        text = plain_text(generator(self.seed, index), self.prompt_words)
        return Request(index, "fixed", (Message("user", text),), self.answer_tokens, is_long=self.prompt_words >= LONG_WORDS)

    def describe(self) -> Description:
        return {"workload": "fixed", **asdict(self)}
