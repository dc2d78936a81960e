"""Streams of chat into which documents are pasted: the workload that the question of a split is about."""

from dataclasses import asdict, dataclass

from baton.bench.errors import require
from baton.bench.request import Message, Request
from baton.bench.text import about, generator, plain_text
from baton.bench.workload.base import Description


@dataclass(frozen=True)
class ChatWithDocuments:
    """Short questions, and in every block of `round(1 / document_share)` requests exactly one, at a random place, that carries a document.

    Lengths are drawn around their middles (words of a prompt, tokens of an answer)."""

    seed: int
    chat_words: int = 60
    document_words: int = 3000
    document_share: float = 0.1
    answer_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("chat_words", "document_words", "answer_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(0 <= self.document_share <= 1, "document_share", self.document_share, "from 0 to 1")

    @property
    def size(self) -> None:
        return None

    def request(self, index: int) -> Request:
        draw = generator(self.seed, index)
        question = plain_text(draw, about(draw, self.chat_words, 0.5))
        max_tokens = about(draw, self.answer_tokens, 0.4)
        if not self._has_document(index):
            return Request(index, "chat", (Message("user", question),), max_tokens, is_long=False)
        document = plain_text(draw, about(draw, self.document_words, 0.2))
        return Request(index, "document", (Message("user", f"{document}\n\n{question}"),), max_tokens, is_long=True)

    def _has_document(self, index: int) -> bool:
        if not self.document_share:
            return False
        block, place = divmod(index, round(1 / self.document_share))
        return place == generator(self.seed, block, 1).integers(round(1 / self.document_share))

    def describe(self) -> Description:
        return {"workload": "chat", **asdict(self)}
