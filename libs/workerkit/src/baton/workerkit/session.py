"""What one gateway still has to be told: events and tokens gather in one report until the stream takes it.

A slow reader gets fewer and longer reports; what can gather is bounded by the rooms that it started.
"""

from __future__ import annotations

import asyncio

from baton.engine.types import PromptLogprobs, Token
from baton.wire.v1 import worker_pb2
from baton.workerkit.convert import logprobs_to_wire, prompt_logprobs_to_wire
from baton.workerkit.prefix_ledger import PrefixTeller


class GatewaySession:
    """One attached gateway. Used on the event loop only."""

    def __init__(self, gateway_id: str, gateway_address: str, prefixes: PrefixTeller | None = None) -> None:
        """prefixes: what is told of the prefix cache, where the gateway asked for it: with the next report, whatever brings that one."""
        self.gateway_id = gateway_id
        self.gateway_address = gateway_address
        self._prefixes = prefixes
        self.last_load: worker_pb2.WorkerLoad | None = None
        self._draining = False
        self._pending = worker_pb2.Report()
        self._something = asyncio.Event()
        self._over = False

    def end(self) -> None:
        """The worker stops: what is still to be told is told, then the stream ends."""
        self._over = True
        self._something.set()

    def event(self, event: worker_pb2.RoomEvent) -> None:
        self._pending.events.append(event)
        self._something.set()

    def tokens(self, events: list[Token]) -> None:
        """One step's tokens of this session's rooms."""
        report = self._pending
        report.rooms.extend([event.room for event in events])
        report.indexes.extend([event.index for event in events])
        report.tokens.extend([event.token for event in events])
        for event in events:
            if event.logprobs is not None:
                report.logprobs.append(logprobs_to_wire(event.room, event.index, event.logprobs))
        self._something.set()

    def prompt_logprobs(self, event: PromptLogprobs) -> None:
        """A part of a prompt's; the room's tokens come after them."""
        self._pending.prompt_logprobs.append(prompt_logprobs_to_wire(event))
        self._something.set()

    def load(self, load: worker_pb2.WorkerLoad, draining: bool) -> None:
        self.last_load = load
        self._draining = draining
        self._pending.load.CopyFrom(load)
        self._something.set()

    def peers(self, states: worker_pb2.PeerStates) -> None:
        self._pending.peers.CopyFrom(states)
        self._something.set()

    async def next_report(self) -> worker_pb2.Report | None:
        """Waits for something to tell and takes all of it; None: it was the last."""
        await self._something.wait()
        if self._over and not self._pending.ByteSize():
            return None
        if not self._over:
            self._something.clear()
        report, self._pending = self._pending, worker_pb2.Report()
        report.draining = self._draining
        if self._prefixes is not None and not self._over:
            if (told := self._prefixes.take()) is not None:
                report.prefix_blocks.CopyFrom(told)
            if self._prefixes.has_more:
                self._something.set()
        return report
