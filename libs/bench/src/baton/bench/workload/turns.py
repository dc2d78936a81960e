"""Conversations of several turns that share a prefix: what a prefix cache is for."""

from dataclasses import asdict, dataclass

from baton.bench.errors import require
from baton.bench.request import Message, Request
from baton.bench.text import generator, plain_text
from baton.bench.workload.base import LONG_WORDS, Description


@dataclass(frozen=True)
class MultiTurn:
    """`num_sessions` conversations at a time of `num_turns` turns under one system prompt of `shared_words` words.

    Turn by turn through the sessions, then new sessions. The answers in a history are made up: what is asked does not depend on a server."""

    seed: int
    num_sessions: int = 8
    num_turns: int = 4
    shared_words: int = 400
    turn_words: int = 40
    answer_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("num_sessions", "num_turns", "turn_words", "answer_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.shared_words >= 0, "shared_words", self.shared_words, "at least 0")

    @property
    def size(self) -> None:
        return None

    def request(self, index: int) -> Request:
        rounds, place = divmod(index, self.num_sessions)
        group, turn = divmod(rounds, self.num_turns)
        session = group * self.num_sessions + place
        messages = [Message("system", plain_text(generator(self.seed), self.shared_words))] if self.shared_words else []
        for earlier in range(turn):
            messages += [self._words("user", session, earlier), self._words("assistant", session, earlier)]
        messages.append(self._words("user", session, turn))
        request = Request(index, f"turn {turn + 1}", tuple(messages), self.answer_tokens, is_long=False)
        return Request(index, request.kind, request.messages, self.answer_tokens, is_long=request.num_prompt_words >= LONG_WORDS)

    def _words(self, role: str, session: int, turn: int) -> Message:
        is_answer = role == "assistant"
        return Message(role, plain_text(generator(self.seed, session, turn, int(is_answer)), self.answer_tokens if is_answer else self.turn_words))

    def describe(self) -> Description:
        return {"workload": "turns", **asdict(self)}
