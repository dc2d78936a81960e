"""A prefill server of three ranks and a decode server of two, over the loopback backend: a room lands with its last doorbell, and not before."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from baton.decode.importer import Importer
from baton.decode.inboxes import Inboxes
from baton.decode.link import PrefillLink
from baton.decode.sampling import DigestSampler
from baton.engine.layout import KVLayout
from baton.engine.ports import Freed, ImportEvent, Landed, LandingFailed, Reservation
from baton.engine.types import Extent, Failure, Request, SamplingParams
from baton.kvtransfer import STATUS_DECLINED, AgentConfig, Doorbell, DoorbellsExhausted, digest, open_ranks, route_spans, routes
from baton.kvtransfer.routes import own_heads
from baton.wire.v1 import bootstrap_pb2
from baton.workerkit import DecodePeer, HostPageHash

WHOLE = KVLayout(num_layers=2, num_kv_heads=6, head_dim=4, page_size=4, num_pages=16, itemsize=4)
HERE, THERE = WHOLE.of_rank(2), WHOLE.of_rank(3)
ROUTES = routes(6, 3, 2)
PAGES = (Extent(4, 2), Extent(9, 1))
SOURCE_PAGES, TARGET_PAGES = [2, 7, 3], [4, 5, 9]
NUM_TOKENS = 10
GONE = Failure("CANCELLED", "client", "client_gone", "left")


class Ranks:
    """An importer of two ranks; the three that write into them are regions of one loopback agent."""

    def __init__(self, num_doorbells: int = 8) -> None:
        self.memories = open_ranks(AgentConfig(instance_id="decode-1", backend="loopback"), ["", ""], HERE.pool_bytes)
        self.sources = open_ranks(AgentConfig(instance_id="prefill-1", backend="loopback"), [""] * 3, THERE.pool_bytes)
        for seed, region in enumerate(self.sources.regions):
            np.frombuffer(region.buffer, dtype=np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, THERE.pool_bytes)
        hashes = [HostPageHash(HERE, partial(digest, region)) for region in self.memories.regions]
        self.importer = Importer(HERE, hashes, self, DigestSampler("all"), link_wait_s=5.0, revoke_timeout_s=2.0)
        self.memories.agents[0].on_doorbell(self.importer.doorbell)
        self.inboxes = Inboxes.open("prefill-1", self.memories.ranks, num_doorbells)
        self.sent: list[bootstrap_pb2.FromDecode] = []
        self.link = PrefillLink("p:1#1", "p:1", "prefill-1", b"", self.inboxes, ROUTES, shares_clock=True, send=self.sent.append)
        self.peers = []
        for route in ROUTES:
            source = self.sources.ranks[route.source_rank]
            self.peers.append(source.agent.connect(self.inboxes.invitations[route.destination_rank], source.region))
        self.events: list[ImportEvent] = []

    def find(self, address: str) -> PrefillLink | None:
        return self.link

    def why_not(self, address: str) -> str:
        return "connected"

    def publish(self, room: int) -> bootstrap_pb2.Publish:
        request = Request(room, [1] * NUM_TOKENS, SamplingParams(), peer=DecodePeer("p:1", "prefill-1"))
        self.importer.publish(request, Reservation(room, PAGES, NUM_TOKENS, 0))
        return next(message.publish for message in reversed(self.sent) if message.WhichOneof("message") == "publish")

    def write(self, told: bootstrap_pb2.Publish, number: int, **more: Any) -> None:
        """What one source rank does for one destination rank: its heads of every page, then the bell."""
        route, handle = ROUTES[number], self.peers[number].begin(told.room)
        for layer in range(WHOLE.num_layers):
            handle.post(route_spans(route, THERE, HERE, layer, SOURCE_PAGES, TARGET_PAGES))
        source = HostPageHash(THERE, partial(digest, self.sources.regions[route.source_rank]))
        extents = [Extent(page, 1) for page in SOURCE_PAGES]
        value = source.of(extents, 0, 3, own_heads(route.source_head, route.num_heads, THERE))
        fields = {"generation": told.lease_generation, "num_tokens": NUM_TOKENS, "first_token": 5, "digest": value, "has_digest": True}
        handle.finish(told.doorbells[number], Doorbell(room=told.room, **(fields | more)))

    def until(self, wanted: type[ImportEvent]) -> Any:
        deadline = time.monotonic() + 5
        while not any(isinstance(event, wanted) for event in self.events):
            self.events += self.importer.poll()
            assert time.monotonic() < deadline, self.events
            time.sleep(0.001)
        return next(event for event in self.events if isinstance(event, wanted))

    def still_waits(self) -> bool:
        """Gives late events their chance."""
        time.sleep(0.02)
        self.events += self.importer.poll()
        return not any(isinstance(event, (Landed, LandingFailed, Freed)) for event in self.events)

    def close(self) -> None:
        self.importer.close()
        self.sources.close()
        self.memories.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_a_room_lands_with_its_last_doorbell(ranks, order) -> None:
    assert len(ROUTES) == 4
    told = ranks.publish(7)
    for number in order[:-1]:
        ranks.write(told, number)
        assert ranks.still_waits()
    ranks.write(told, order[-1])
    landed = ranks.until(Landed)
    assert (landed.first_token, landed.digest_checked) == (5, True)
    assert ranks.importer.num_leases == 0
    arrays = [np.frombuffer(region.buffer, dtype=np.float32).reshape(4, 16, 4, 3, 4)[:, TARGET_PAGES] for region in ranks.memories.regions]
    sources = [np.frombuffer(region.buffer, dtype=np.float32).reshape(4, 16, 4, 2, 4)[:, SOURCE_PAGES] for region in ranks.sources.regions]
    assert np.concatenate(arrays, axis=3).tobytes() == np.concatenate(sources, axis=3).tobytes()


@pytest.mark.parametrize("bad", range(4))
def test_one_ranks_doorbell_of_another_generation_never_admits(ranks, bad) -> None:
    told = ranks.publish(7)
    for number in range(4):
        ranks.write(told, number, generation=told.lease_generation + (number == bad))
    assert ranks.still_waits()
    ranks.importer.abort(7, GONE)
    assert ranks.still_waits()
    ranks.importer.quiesced(7, told.lease_generation)
    assert ranks.until(Freed).room == 7


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize(
    ("wrong", "cause"),
    [({"digest": 1}, "digest_mismatch"), ({"has_digest": False}, "digest_missing"), ({"num_tokens": 9}, "length_mismatch"),
     ({"first_token": 6}, "first_token_differs")],
)  # fmt: skip
def test_what_one_rank_gets_wrong_ends_the_room(ranks, bad, wrong, cause) -> None:
    told = ranks.publish(7)
    for number in range(4):
        ranks.write(told, number, **(wrong if number == bad else {}))
    assert ranks.until(LandingFailed).failure.cause == cause
    assert ranks.until(Freed).room == 7


def test_a_rank_that_declines_frees_nothing_before_the_others_are_done(ranks) -> None:
    told = ranks.publish(7)
    ranks.write(told, 0, status=STATUS_DECLINED)
    for number in (1, 2):
        ranks.write(told, number)
    assert ranks.still_waits()
    ranks.write(told, 3)
    assert ranks.until(LandingFailed).failure.cause == "declined"
    assert ranks.until(Freed).room == 7


def test_an_abort_waits_for_every_rank(ranks) -> None:
    told = ranks.publish(7)
    for number in range(3):
        ranks.write(told, number)
    ranks.importer.abort(7, GONE)
    assert ranks.still_waits()
    assert ranks.sent[-1].WhichOneof("message") == "revoke"
    ranks.write(told, 3)
    assert ranks.until(Freed).room == 7


def test_a_fence_is_proof_for_every_rank(ranks) -> None:
    ranks.publish(7)
    ranks.importer.link_lost(ranks.link, "its session ended")
    for number in range(3):
        ranks.peers[number].close()
        assert not ranks.inboxes.fence(None)
    ranks.peers[3].close()
    assert ranks.inboxes.fence(None)
    ranks.importer.link_fenced(ranks.link)
    assert ranks.until(Freed).room == 7


def test_doorbells_are_taken_for_all_routes_or_none() -> None:
    ranks = Ranks(num_doorbells=3)
    try:
        slots = ranks.link.arm(1, 1)
        with pytest.raises(DoorbellsExhausted):
            ranks.link.arm(2, 1)  # each rank has one left, and two of its routes want one
        ranks.inboxes.disarm(ROUTES, ranks.inboxes.arm(ROUTES[:1], 9, 1))  # the one that room 2 had taken is free again
        ranks.link.disarm(slots)
        assert len(ranks.link.arm(3, 1)) == 4
        with pytest.raises(DoorbellsExhausted):
            ranks.link.arm(4, 1)
    finally:
        ranks.close()
