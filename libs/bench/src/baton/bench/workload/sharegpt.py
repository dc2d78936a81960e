"""Conversations from a JSON file in the form of ShareGPT: a list of {"conversations": [{"from": "human" | "gpt", "value": text}, ...]}."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.errors import BenchFileError, require
from baton.bench.request import Message, Request
from baton.bench.text import generator
from baton.bench.workload.base import LONG_WORDS, Description

#: English prose has about four tokens to three words.
TOKENS_A_WORD = 4 / 3


@dataclass(frozen=True)
class ShareGPT:
    """The first question of each conversation, in an order drawn from `seed`, with an answer as long as the recorded one, by its words."""

    seed: int
    pairs: tuple[tuple[str, str], ...]
    sha256: str

    @classmethod
    def load(cls, path: Path, seed: int) -> "ShareGPT":
        """Reads the whole file. Raises BenchFileError if it is not of this form or has no question with an answer, OSError."""
        data = path.read_bytes()
        try:
            entries = json.loads(data)
        except ValueError as error:
            raise BenchFileError(f"{path} is not JSON: {error}") from error
        if not isinstance(entries, list):
            raise BenchFileError(f"{path} holds a {type(entries).__name__}, but a ShareGPT file is a list of conversations")
        pairs = [pair for entry in entries if (pair := _first_pair(entry)) is not None]
        if not pairs:
            raise BenchFileError(
                f"{path}: none of its {len(entries)} entries begins with a question ('from': 'human') and its answer ('from': 'gpt')"
            )
        return cls(seed, tuple(pairs[place] for place in generator(seed).permutation(len(pairs))), hashlib.sha256(data).hexdigest())

    @property
    def size(self) -> int:
        return len(self.pairs)

    def request(self, index: int) -> Request:
        require(0 <= index < self.size, "index", index, f"below {self.size}, the conversations of the file")
        question, answer = self.pairs[index]
        max_tokens = max(1, round(len(answer.split()) * TOKENS_A_WORD))
        return Request(index, "sharegpt", (Message("user", question),), max_tokens, is_long=len(question.split()) >= LONG_WORDS)

    def describe(self) -> Description:
        return {"workload": "sharegpt", "seed": self.seed, "conversations": self.size, "sha256": self.sha256}


def _first_pair(entry: Any) -> tuple[str, str] | None:
    """None for a conversation that begins otherwise: such entries are in the public files."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    question, answer = turns[:2]
    if (question.get("from"), answer.get("from")) != ("human", "gpt") or not str(question.get("value", "")).strip():
        return None
    return str(question["value"]), str(answer.get("value", ""))
