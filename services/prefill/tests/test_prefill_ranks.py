"""A prefill server of three ranks, a decode server of two, over loopback: writes, events, cancellation and ends of all routes together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from baton.engine.layout import KVLayout
from baton.engine.ports import ExportEvent, SendDone, SendFailed
from baton.engine.types import Extent, Failure, Request, SamplingParams
from baton.kvtransfer import AgentConfig, Closed, Doorbell, InvalidArgument, PeerUnreachable, digest, open_ranks, routes
from baton.prefill.errors import BadPublicationError
from baton.prefill.exporter import Exporter
from baton.prefill.link import DecodeLink
from baton.prefill.publication import Publication, read_publication
from baton.prefill.ways import close_ways, open_ways, probe_ways
from baton.wire.v1 import bootstrap_pb2, common_pb2
from baton.workerkit import HostPageHash, PrefillPeer

WHOLE = KVLayout(num_layers=2, num_kv_heads=6, head_dim=4, page_size=4, num_pages=16, itemsize=4)
HERE, THERE = WHOLE.of_rank(3), WHOLE.of_rank(2)
ROUTES = routes(6, 3, 2)
NUM_TOKENS = 10
SOURCE_PAGES, TARGET_PAGES = [5, 6, 7], [20 % 16, 3, 9]
GONE = Failure("CANCELLED", "client", "client_gone", "left")


@dataclass
class Event:
    """As torch's."""

    cuda_event: int


class Ranks:
    def __init__(self) -> None:
        self.sources = open_ranks(AgentConfig(instance_id="prefill-1", backend="loopback"), [""] * 3, HERE.pool_bytes)
        for seed, region in enumerate(self.sources.regions):
            np.frombuffer(region.buffer, dtype=np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, HERE.pool_bytes)
        hashes = [HostPageHash(HERE, partial(digest, region)) for region in self.sources.regions]
        self.exporter = Exporter(HERE, hashes, unmatched_timeout_s=5.0, max_unmatched=3)
        self.sources.agents[0].on_write(self.exporter.write_ended)
        self.targets = open_ranks(AgentConfig(instance_id="decode-1", backend="loopback"), ["", ""], THERE.pool_bytes)
        self.inboxes: list[Any] = [rank.agent.open_inbox("prefill-1", rank.region, 16) for rank in self.targets.ranks]
        self.bells: dict[int, list[Doorbell]] = {0: [], 1: []}
        self.targets.agents[0].on_doorbell(lambda inbox: self.bells[self.inboxes.index(inbox)].extend(inbox.poll()))
        self.ways = open_ways(ROUTES, self.sources.ranks, [inbox.invitation for inbox in self.inboxes])
        self.told: list[bootstrap_pb2.FromPrefill] = []
        self.failed: list[str] = []
        self.link = DecodeLink("decode-1", self.ways, THERE, "xxh3-64", self.told.append, self.failed.append)
        self.events: list[ExportEvent] = []

    def publication(self, room: int, **more: Any) -> Publication:
        slots = [self.inboxes[route.destination_rank].arm(room, 1) for route in ROUTES]
        pages = [common_pb2.Extent(first=page, count=1) for page in TARGET_PAGES]
        fields = {"lease_generation": 1, "num_tokens": NUM_TOKENS, "pages": pages, "digest": True, "doorbells": slots}
        return read_publication(bootstrap_pb2.Publish(room=room, **(fields | more)), self.link)

    def expect(self, room: int) -> None:
        self.exporter.expect(Request(room, [1] * NUM_TOKENS, SamplingParams(), peer=PrefillPeer("decode-1")))
        self.exporter.start(room, [Extent(SOURCE_PAGES[0], 3)], NUM_TOKENS)

    def compute(self, room: int, ready: object | None = None) -> None:
        for layer in range(WHOLE.num_layers):
            self.exporter.layer_done(layer, [(room, 0, 3)], ready)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not condition():
            self.events += self.exporter.poll()
            assert time.monotonic() < deadline, self.events
            time.sleep(0.001)

    def over(self, room: int) -> ExportEvent:
        def ends() -> list[ExportEvent]:
            return [event for event in self.events if isinstance(event, (SendDone, SendFailed)) and event.room == room]

        self.until(lambda: bool(ends()))
        (end,) = ends()
        return end

    def close(self) -> None:
        self.exporter.close()
        self.sources.close()
        self.targets.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("published_first", [False, True])
def test_every_route_writes_its_heads_and_rings_its_own_bell(ranks, published_first) -> None:
    if published_first:
        ranks.exporter.published(ranks.publication(7))
        ranks.expect(7)
        ranks.compute(7)
    else:
        ranks.expect(7)
        ranks.compute(7)
        ranks.exporter.published(ranks.publication(7))
    ranks.exporter.finish(7, 5)
    done = ranks.over(7)
    assert isinstance(done, SendDone)
    assert done.stats.num_bytes == 3 * 2 * 2 * WHOLE.page_bytes
    assert (done.stats.transport, done.stats.digest) == ("loopback", True)
    targets = [np.frombuffer(region.buffer, dtype=np.float32).reshape(4, 16, 4, 3, 4)[:, TARGET_PAGES] for region in ranks.targets.regions]
    sources = [np.frombuffer(region.buffer, dtype=np.float32).reshape(4, 16, 4, 2, 4)[:, SOURCE_PAGES] for region in ranks.sources.regions]
    assert np.concatenate(targets, axis=3).tobytes() == np.concatenate(sources, axis=3).tobytes()
    ranks.until(lambda: sum(map(len, ranks.bells.values())) == 4)
    for rank, into in itertools.groupby(enumerate(ROUTES), key=lambda numbered: numbered[1].destination_rank):
        there = HostPageHash(THERE, partial(digest, ranks.targets.regions[rank]))
        extents = [Extent(page, 1) for page in TARGET_PAGES]
        landed = sorted(there.of(extents, 0, 3, (route.destination_head, route.num_heads)) for _, route in into)
        assert sorted(bell.digest for bell in ranks.bells[rank]) == landed
        assert {(bell.room, bell.generation, bell.num_tokens, bell.first_token) for bell in ranks.bells[rank]} == {(7, 1, NUM_TOKENS, 5)}


def test_a_route_waits_for_its_own_ranks_event(ranks, monkeypatch) -> None:
    waited: list[list[int | None]] = [[] for _ in ROUTES]
    ranks.expect(7)
    ranks.exporter.published(ranks.publication(7))
    for number, write in enumerate(ranks.exporter._rooms.get(7).writes):
        monkeypatch.setattr(write.handle, "post", lambda spans, ready=None, number=number: waited[number].append(ready))
    ranks.compute(7, ready=tuple(Event(100 + rank) for rank in range(3)))
    assert waited == [[100 + route.source_rank] * WHOLE.num_layers for route in ROUTES]
    ranks.exporter.abort(7, GONE)
    assert isinstance(ranks.over(7), SendFailed)


def test_a_revoke_is_answered_when_every_route_has_ended(ranks, monkeypatch) -> None:
    ranks.expect(7)
    ranks.exporter.published(ranks.publication(7))
    ranks.compute(7)
    last = ranks.exporter._rooms.get(7).writes[-1].handle
    cancel = last.cancel
    monkeypatch.setattr(last, "cancel", lambda: None)
    ranks.exporter.revoked(ranks.link, 7, 1, GONE)
    time.sleep(0.05)
    assert ranks.exporter.poll()[-1:] != [SendFailed(7, GONE)]
    assert ranks.told == []
    cancel()
    assert ranks.over(7) == SendFailed(7, GONE)
    assert [(message.WhichOneof("message"), message.quiesced.room) for message in ranks.told] == [("quiesced", 7)]
    assert ranks.bells == {0: [], 1: []}


def test_one_route_that_breaks_ends_the_session_and_the_room_only_when_all_ways_are_closed(ranks) -> None:
    ranks.expect(7)
    ranks.exporter.published(ranks.publication(7))
    ranks.sources.agents[0].lose(ranks.ways[1].peer)
    ranks.until(lambda: bool(ranks.failed))
    time.sleep(0.02)
    assert not any(isinstance(event, (SendDone, SendFailed)) for event in ranks.exporter.poll())
    ranks.exporter.link_closing(ranks.link, "broken")
    close_ways(ranks.ways)
    ranks.exporter.link_closed(ranks.link)
    assert isinstance(ranks.over(7), SendFailed)


def test_a_publication_needs_a_doorbell_for_every_route(ranks) -> None:
    with pytest.raises(BadPublicationError, match=r"doorbells holds 2 slots: this pair has 4 routes, each of which rings its own"):
        ranks.publication(7, doorbells=[0, 1])
    with pytest.raises(BadPublicationError, match=r"doorbells holds 1 slots"):
        ranks.publication(7, doorbells=[], doorbell=3)


def test_ways_are_opened_all_or_none_and_the_slowest_is_the_verdict(ranks, monkeypatch) -> None:
    invitations = [inbox.invitation for inbox in ranks.inboxes]
    before = len(ranks.sources.agents[0]._peers)
    with pytest.raises(InvalidArgument):
        open_ways(ROUTES, ranks.sources.ranks, [invitations[0], b"damaged"])
    opened = ranks.sources.agents[0]._peers[before:]
    assert len(opened) == 2
    for peer in opened:
        with pytest.raises(Closed):
            peer.begin(1)
    points = [way.peer.probe() for way in ranks.ways]
    slowest = points[2][0].__class__("write", 64 << 10, 0.001)
    for way, own in zip(ranks.ways, points, strict=True):
        monkeypatch.setattr(way.peer, "probe", lambda own=own, way=way: [slowest if way is ranks.ways[2] else own[0], *own[1:]])
    assert next(point for point in probe_ways(ranks.ways) if point.num_bytes == 64 << 10) == slowest


def test_a_way_that_cannot_begin_leaves_no_write_open(ranks, monkeypatch) -> None:
    def gone(room: int) -> None:
        raise PeerUnreachable("gone")

    monkeypatch.setattr(ranks.ways[2].peer, "begin", gone)
    ranks.expect(7)
    ranks.exporter.published(ranks.publication(7))
    failed = ranks.over(7)
    assert isinstance(failed, SendFailed)
    assert failed.failure.cause == "decode_lost"
    assert ranks.failed == ["gone"]
    assert ranks.told[0].declined.room == 7
