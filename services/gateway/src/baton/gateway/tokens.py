"""One room's tokens on their way from the workers to the client: put in order by index, buffered within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.gateway.errors import RoomFailedError
from baton.wire.v1 import common_pb2


class TokenConflictError(Exception):
    """Two servers name different tokens for one place of the answer, or a place that the answer cannot have."""


class TokenMerge:
    """Tokens by index: the first comes from prefill, the others from decode, each over its own stream. Pure.

    A repeated token is ignored and counted; one that comes early waits for those before it.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        self._early: dict[int, int] = {}
        self.num_repeated = 0

    @property
    def tokens(self) -> Sequence[int]:
        """Those that were delivered."""
        return self._tokens

    @property
    def num_delivered(self) -> int:
        return len(self._tokens)

    @property
    def num_early(self) -> int:
        """Tokens that wait for one before them."""
        return len(self._early)

    def add(self, index: int, token: int) -> list[int]:
        """The tokens that are next in the answer now; empty when one before is missing. Raises TokenConflictError."""
        if index >= self._max_tokens:
            raise TokenConflictError(f"token number {index} of an answer of at most {self._max_tokens} tokens")
        known = self._tokens[index] if index < len(self._tokens) else self._early.get(index)
        if known is not None:
            if known != token:
                raise TokenConflictError(f"token number {index} is {known} from one server and {token} from the other")
            self.num_repeated += 1
            return []
        self._early[index] = token
        start = len(self._tokens)
        while (following := self._early.pop(len(self._tokens), None)) is not None:
            self._tokens.append(following)
        return self._tokens[start:]

    def extend(self, first: int, tokens: Sequence[int]) -> bool:
        """Takes all of `tokens` when they are just what is next in the answer; False: nothing was taken, they are to be added one by one."""
        if first != len(self._tokens) or self._early or first + len(tokens) > self._max_tokens:
            return False
        self._tokens += tokens
        return True


class TokenStream:
    """A bounded buffer between the reader of the workers' streams, who must not wait, and one client, who may be slow."""

    def __init__(self, max_buffered: int) -> None:
        self._max_buffered = max_buffered
        self._buffer: list[int] = []
        self._failure: common_pb2.Failure | None = None
        self._reader: asyncio.Future[None] | None = None
        self.finish: common_pb2.FinishReason.ValueType | None = None

    def push(self, tokens: list[int]) -> bool:
        """False when the client is so far behind that the bound is passed; the caller then ends the room."""
        self._buffer += tokens
        self._wake()
        return len(self._buffer) <= self._max_buffered

    def end(self, reason: common_pb2.FinishReason.ValueType) -> None:
        self.finish = reason
        self._wake()

    def fail(self, failure: common_pb2.Failure) -> None:
        self._failure = failure
        self._wake()

    async def take(self) -> list[int]:
        """All tokens that are there, at least one; empty once, at the end of the answer. Raises RoomFailedError after the last token.

        One reader at a time. It waits for a future: an asyncio.Event takes three times as long, for every token.
        """
        while not self._buffer:
            if self._failure is not None:
                raise RoomFailedError(self._failure)
            if self.finish is not None:
                return []
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        taken, self._buffer = self._buffer, []
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
