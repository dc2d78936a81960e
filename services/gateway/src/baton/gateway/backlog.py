"""What one worker said of its rooms and they have not been told yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.wire.v1 import worker_pb2


@dataclass(slots=True)
class Run:
    """Tokens that follow each other in an answer, from its token number `first` on."""

    first: int
    tokens: list[int]


#: Log probabilities of a token come before the token, those of a prompt before the first.
Word = Run | worker_pb2.RoomLogprobs | worker_pb2.RoomPromptLogprobs | worker_pb2.RoomEvent


class Backlog:
    """Within a room everything keeps its order; tokens of several steps for one room become one run.

    Between rooms, one that hears of its answer's first token or of an event goes first: a step's tokens for hundreds of streams, each of which
    takes a write, do not stand before an answer that begins.
    """

    def __init__(self) -> None:
        self._first: dict[int, list[Word]] = {}
        self._others: dict[int, list[Word]] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        """Rooms that wait."""
        return len(self._first) + len(self._others)

    @property
    def num_first(self) -> int:
        """Of these, rooms that go first."""
        return len(self._first)

    def add(self, report: worker_pb2.Report) -> None:
        """A report's tokens come before its events."""
        for of_prompt in report.prompt_logprobs:
            self._words(of_prompt.room, first=True).append(of_prompt)
        for said in report.logprobs:
            self._words(said.room, first=said.index == 0).append(said)
        known, words = 0, None
        for room, index, token in zip(report.rooms, report.indexes, report.tokens, strict=True):
            if room != known or words is None:
                known, words = room, self._words(room, first=index == 0)
            last = words[-1] if words else None
            if isinstance(last, Run) and last.first + len(last.tokens) == index:
                last.tokens.append(token)
            else:
                words.append(Run(index, [token]))
        self.num_tokens += len(report.tokens)
        for event in report.events:
            self._words(event.room, first=True).append(event)

    def take(self) -> tuple[int, list[Word]]:
        """The next room and what it is to be told. KeyError when nobody waits."""
        waiting = self._first or self._others
        room = next(iter(waiting), None)
        if room is None:
            raise KeyError("no room waits")
        words = waiting.pop(room)
        self.num_tokens -= sum(len(word.tokens) for word in words if isinstance(word, Run))
        return room, words

    def _words(self, room: int, *, first: bool) -> list[Word]:
        """A room that waits keeps its place: what is said later may not overtake what was said before."""
        words = self._first.get(room)
        if words is None:
            words = self._others.get(room)
        if words is None:
            words = (self._first if first else self._others)[room] = []
        return words
