"""An exporter over the loopback backend: the receiving half is a plain inbox that tests look into."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from baton.engine.layout import KVLayout
from baton.engine.ports import ExportEvent
from baton.engine.types import Extent, Failure, Request, SamplingParams
from baton.kvtransfer import Agent, AgentConfig, Doorbell, Inbox, Peer, RankMemories, RankMemory, digest, open_agent, routes
from baton.prefill.exporter import Exporter
from baton.prefill.link import DecodeLink, Way
from baton.prefill.publication import read_publication
from baton.wire.v1 import bootstrap_pb2, common_pb2
from baton.workerkit import HostPageHash, PrefillPeer

SOURCE = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, num_pages=16, itemsize=4)
TARGET = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, num_pages=32, itemsize=4)
GONE = Failure("CANCELLED", "client", "client_gone", "left")


class Decode:
    """A decode server's half of the transfer, and what it was told."""

    def __init__(self, sender: Agent, source: Any, name: str) -> None:
        self.agent: Any = open_agent(AgentConfig(instance_id=name, backend="loopback"))
        self.region = self.agent.allocate(TARGET.pool_bytes)
        self.inbox: Inbox = self.agent.open_inbox("prefill", self.region, 64)
        self.peer: Peer = sender.connect(self.inbox.invitation, source)
        self.told: list[bootstrap_pb2.FromPrefill] = []
        self.failed: list[str] = []
        self.bells: list[Doorbell] = []
        self.agent.on_doorbell(lambda inbox: self.bells.extend(inbox.poll()))
        self.link = DecodeLink(name, [Way(*routes(1, 1, 1), self.peer)], TARGET, "xxh3-64", self.told.append, self.failed.append)

    def publish(self, room: int, generation: int = 1, **more: Any) -> Any:
        fields: dict[str, Any] = {"num_tokens": 10, "pages": [common_pb2.Extent(first=20, count=2), common_pb2.Extent(first=3, count=1)]}
        fields |= more
        slot = self.inbox.arm(room, generation)
        return read_publication(bootstrap_pb2.Publish(room=room, lease_generation=generation, doorbell=slot, **fields), self.link)

    def said(self) -> list[tuple[str, int, int]]:
        """(kind, room, generation) of every answer."""
        kinds = [(message.WhichOneof("message"), message) for message in self.told]
        return [(str(kind), getattr(message, str(kind)).room, getattr(message, str(kind)).lease_generation) for kind, message in kinds]

    def page(self, layer: int, values: bool, page: int) -> bytes:
        offset = TARGET.offset(layer, values, page)
        return bytes(self.region.buffer[offset : offset + TARGET.page_bytes])


class Prefill:
    """The sending half, driven like an engine would."""

    def __init__(self) -> None:
        self.agent: Any = open_agent(AgentConfig(instance_id="prefill-1", backend="loopback"))
        self.region = self.agent.allocate(SOURCE.pool_bytes)
        np.frombuffer(self.region.buffer, dtype=np.uint8)[:] = np.random.default_rng(3).integers(1, 255, SOURCE.pool_bytes)
        self.exporter = Exporter(SOURCE, [HostPageHash(SOURCE, partial(digest, self.region))], unmatched_timeout_s=5.0, max_unmatched=3)
        self.agent.on_write(self.exporter.write_ended)
        self.layout = SOURCE
        self.memories = RankMemories((RankMemory(self.agent, self.region),), (self.agent,))
        self.events: list[ExportEvent] = []
        self.wakes = 0
        self.exporter.on_wake(self._woken)
        self.decodes: list[Decode] = []

    def _woken(self) -> None:
        self.wakes += 1

    def decode(self, name: str = "decode-1") -> Decode:
        decode = Decode(self.agent, self.region, name)
        self.decodes.append(decode)
        return decode

    def expect(self, room: int, decode: str = "decode-1", num_tokens: int = 10) -> None:
        self.exporter.expect(Request(room, [1] * num_tokens, SamplingParams(), peer=PrefillPeer(decode)))

    def compute(self, room: int, first: int = 0, count: int = 3) -> None:
        for layer in range(SOURCE.num_layers):
            self.exporter.layer_done(layer, [(room, first, count)])

    def start(self, room: int) -> None:
        self.exporter.start(room, [Extent(5, 3)], 10)

    def whole(self, room: int) -> None:
        self.start(room)
        self.compute(room)
        self.exporter.finish(room, 42)

    def page(self, layer: int, values: bool, page: int) -> bytes:
        offset = SOURCE.offset(layer, values, page)
        return bytes(self.region.buffer[offset : offset + SOURCE.page_bytes])

    def names(self) -> list[tuple[str, int]]:
        self.events += self.exporter.poll()
        return [(type(event).__name__, event.room) for event in self.events]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not condition():
            self.events += self.exporter.poll()
            assert time.monotonic() < deadline, self.events
            time.sleep(0.001)

    def until_over(self, room: int) -> ExportEvent:
        self.until(lambda: any(event.room == room and type(event).__name__ in ("SendDone", "SendFailed") for event in self.events))
        return next(event for event in self.events if event.room == room and type(event).__name__ in ("SendDone", "SendFailed"))

    def close(self) -> None:
        self.exporter.close()
        self.agent.close()
        for decode in self.decodes:
            decode.agent.close()


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    prefill = Prefill()
    yield prefill
    prefill.close()


@pytest.fixture
def gone() -> Failure:
    return GONE


@pytest.fixture
def target() -> KVLayout:
    return TARGET
