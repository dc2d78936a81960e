"""One room as its front tells it: the answer's tokens in order, and how the leg ended."""

from __future__ import annotations

import asyncio

from baton.engine.types import Token
from baton.wire.v1 import common_pb2, worker_pb2
from baton.workerkit.session import GatewaySession


class RoomSession(GatewaySession):
    """The owner of one room, in the place of a gateway. Never attached: it gets no load. What it gathers is bounded by the answer's max_tokens."""

    def __init__(self) -> None:
        super().__init__("sglang", "")
        self.token_ids: list[int] = []
        self.num_resident = 0
        self.finished: worker_pb2.Finished | None = None
        self.failure: common_pb2.Failure | None = None
        self.is_over = False
        self._num_taken = 0
        self._news = asyncio.Event()

    def event(self, event: worker_pb2.RoomEvent) -> None:
        match event.WhichOneof("event"):
            case "reserved":
                self.num_resident = event.reserved.resident_tokens
            case "kv_ready":
                self.token_ids.append(event.kv_ready.first_token)
            case "finished":
                self.finished, self.is_over = event.finished, True
            case "transferred":
                self.is_over = True
            case "failed":
                self.failure, self.is_over = event.failed, True
        self._news.set()

    def tokens(self, events: list[Token]) -> None:
        for event in events:
            assert event.index == len(self.token_ids), f"token {event.index} came where {len(self.token_ids)} was due"
            self.token_ids.append(event.token)
        self._news.set()

    async def take(self) -> list[int]:
        """The tokens that came since the last call, at least one; empty at the end, once the leg is over."""
        while self._num_taken == len(self.token_ids) and not self.is_over:
            self._news.clear()
            await self._news.wait()
        taken = self.token_ids[self._num_taken :]
        self._num_taken = len(self.token_ids)
        return taken
