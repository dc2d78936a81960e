"""An importer and, behind a link, the prefill server that writes to it: both over the loopback backend."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from baton.decode.importer import Importer
from baton.decode.inboxes import Inboxes
from baton.decode.link import PrefillLink
from baton.decode.sampling import DigestSampler
from baton.engine.layout import KVLayout
from baton.engine.ports import ImportEvent, LandingFailed, Reservation
from baton.engine.types import Extent, Failure, Request, SamplingParams
from baton.kvtransfer import AgentConfig, Doorbell, digest, open_agent, routes
from baton.wire.v1 import bootstrap_pb2
from baton.workerkit import DecodePeer, HostPageHash
from baton.workerkit.runs import digest_runs

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, num_pages=16, itemsize=4)
GONE = Failure("CANCELLED", "client", "client_gone", "left")
PAGES = (Extent(4, 2), Extent(9, 1))
NUM_TOKENS = 10


class Decode:
    """An importer with one prefill server behind `link`; that server's half is a loopback agent that writes into our pool."""

    def __init__(self, digests: str = "off") -> None:
        self.agent: Any = open_agent(AgentConfig(instance_id="decode-1", backend="loopback"))
        self.sender: Any = open_agent(AgentConfig(instance_id="prefill-1", backend="loopback"))
        self.region = self.agent.allocate(LAYOUT.pool_bytes)
        self.source = self.sender.allocate(LAYOUT.pool_bytes)
        np.frombuffer(self.source.buffer, dtype=np.uint8)[:] = 7
        self.links: dict[str, PrefillLink] = {}
        page_hashes = [HostPageHash(LAYOUT, partial(digest, self.region))]
        self.importer = Importer(LAYOUT, page_hashes, self, DigestSampler(digests), link_wait_s=5.0, revoke_timeout_s=2.0)  # type: ignore[arg-type]
        self.agent.on_doorbell(self.importer.doorbell)
        self.sent: list[bootstrap_pb2.FromDecode] = []
        self.events: list[ImportEvent] = []
        self.connect()

    # the directory
    def find(self, address: str) -> PrefillLink | None:
        return self.links.get(address)

    def why_not(self, address: str) -> str:
        return "it is away"

    def connect(self, instance_id: str = "prefill-1", num_doorbells: int = 64) -> PrefillLink:
        inbox = self.agent.open_inbox("prefill-1", self.region, num_doorbells)
        self.peer = self.sender.connect(inbox.invitation, self.source)
        key = f"p:1#{id(inbox)}"
        self.link = PrefillLink(key, "p:1", instance_id, b"", Inboxes(key, [inbox]), routes(1, 1, 1), shares_clock=True, send=self.sent.append)
        self.links["p:1"] = self.link
        return self.link

    def publish(self, room: int, instance_id: str = "prefill-1", address: str = "p:1", resident_pages: int = 0) -> None:
        request = Request(room, [1] * NUM_TOKENS, SamplingParams(), peer=DecodePeer(address, instance_id))
        self.importer.publish(request, Reservation(room, PAGES, NUM_TOKENS, resident_pages * LAYOUT.page_size, resident_pages))

    def published(self, room: int) -> bootstrap_pb2.Publish:
        return next(message.publish for message in self.sent if message.WhichOneof("message") == "publish" and message.publish.room == room)

    def revokes(self) -> list[tuple[int, int]]:
        return [(m.revoke.room, m.revoke.lease_generation) for m in self.sent if m.WhichOneof("message") == "revoke"]

    def write(self, room: int, **more: Any) -> None:
        """What prefill does: pages, then the bell."""
        told = self.published(room)
        handle = self.peer.begin(room)
        handle.post(np.array([[offset, offset, size] for offset, size in digest_runs(LAYOUT, PAGES, 0, 3)], dtype=np.int64))
        fields: dict[str, Any] = {"num_tokens": NUM_TOKENS, "first_token": 5, "last_layer_ns": time.monotonic_ns()}
        fields["generation"] = told.lease_generation
        handle.finish(told.doorbell, Doorbell(room=room, **(fields | more)))

    def names(self) -> list[tuple[str, int]]:
        self.events += self.importer.poll()
        return [(type(event).__name__, event.room) for event in self.events]

    def until(self, *names: tuple[str, int]) -> None:
        deadline = time.monotonic() + 5
        while not set(names) <= set(self.names()):
            assert time.monotonic() < deadline, self.events
            time.sleep(0.001)

    def failure(self, room: int) -> Failure:
        return next(event.failure for event in self.events if isinstance(event, LandingFailed) and event.room == room)

    def settle(self) -> None:
        """Gives late events their chance."""
        time.sleep(0.05)
        self.names()

    def close(self) -> None:
        self.importer.close()
        self.sender.close()
        self.agent.close()
