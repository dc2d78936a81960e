"""Every order in which a doorbell, an abort, an answer, a loss and a fence can come, over the loopback backend."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from baton.decode.importer import Importer
from baton.decode.inboxes import Inboxes
from baton.decode.link import PrefillLink
from baton.decode.sampling import SAMPLE_ONE_IN, DigestSampler
from baton.engine.layout import KVLayout
from baton.engine.ports import Freed, ImportEvent, Landed, LandingFailed, Reservation
from baton.engine.types import Extent, Failure, Request, SamplingParams
from baton.kvtransfer import STATUS_DECLINED, AgentConfig, Doorbell, digest, open_agent, routes
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


@pytest.fixture
def make_decode() -> Iterator[Callable[..., Decode]]:
    made: list[Decode] = []

    def make(digests: str = "off") -> Decode:
        made.append(Decode(digests))
        return made[-1]

    yield make
    for decode in made:
        decode.close()


@pytest.fixture
def decode(make_decode: Callable[..., Decode]) -> Decode:
    return make_decode()


def test_a_room_lands(decode) -> None:
    decode.publish(7)
    told = decode.published(7)
    assert [(extent.first, extent.count) for extent in told.pages] == [(4, 2), (9, 1)]
    assert (told.num_tokens, told.resident_tokens, told.digest) == (NUM_TOKENS, 0, False)
    decode.write(7)
    decode.until(("Landed", 7))
    assert decode.names() == [("Published", 7), ("Landed", 7)]
    landed = decode.events[-1]
    assert isinstance(landed, Landed)
    assert (landed.first_token, landed.digest_checked) == (5, False)
    assert 0 < landed.exposed_s < 5
    assert decode.importer.num_leases == 0


def test_the_digest_is_compared(make_decode) -> None:
    decode = make_decode("all")
    value = digest(decode.source, digest_runs(LAYOUT, PAGES, 0, 3))
    for room, more in ((7, {"digest": value, "has_digest": True}), (8, {"digest": value ^ 1, "has_digest": True}), (9, {})):
        decode.publish(room)
        assert decode.published(room).digest
        decode.write(room, **more)
    decode.until(("Landed", 7), ("Freed", 8), ("Freed", 9))
    assert (decode.failure(8).code, decode.failure(8).cause, decode.failure(8).origin) == ("DATA_LOSS", "digest_mismatch", "transfer")
    assert decode.failure(9).cause == "digest_missing"


def test_one_room_in_some_is_sampled() -> None:
    assert [DigestSampler("sample").wants(room) for room in range(2 * SAMPLE_ONE_IN)].count(True) == 2
    assert not DigestSampler("off").wants(SAMPLE_ONE_IN)


@pytest.mark.parametrize(("more", "cause"), [({"num_tokens": 9}, "length_mismatch"), ({"first_token": -1}, "first_token_missing")])
def test_what_was_not_asked_for_does_not_land(decode, more, cause) -> None:
    decode.publish(7)
    decode.write(7, **more)
    decode.until(("LandingFailed", 7), ("Freed", 7))
    assert decode.failure(7).cause == cause


def test_an_abort_frees_only_on_the_writers_word(decode) -> None:
    decode.publish(7)
    decode.importer.abort(7, GONE)
    decode.importer.abort(7, GONE)
    generation = decode.published(7).lease_generation
    assert decode.revokes() == [(7, generation)]
    decode.importer.tick(time.monotonic() + 1.9)
    assert decode.importer.quarantined_pages() == 0
    decode.importer.tick(time.monotonic() + 2.1)
    decode.importer.tick(time.monotonic() + 1000)
    assert decode.importer.quarantined_pages() == 3
    assert ("Freed", 7) not in decode.names()
    decode.importer.quiesced(7, generation + 1)  # of another lease
    assert ("Freed", 7) not in decode.names()
    decode.importer.quiesced(7, generation)
    decode.importer.quiesced(7, generation)
    assert decode.names() == [("Published", 7), ("Freed", 7)]
    assert decode.importer.quarantined_pages() == 0


def test_a_bell_that_rings_after_the_abort_is_proof_too(decode) -> None:
    decode.publish(7)
    decode.importer.abort(7, GONE)
    decode.write(7)
    decode.until(("Freed", 7))
    decode.importer.quiesced(7, decode.published(7).lease_generation)
    assert decode.names() == [("Published", 7), ("Freed", 7)]


def test_an_abort_that_crosses_a_landing_frees_once(decode) -> None:
    decode.publish(7)
    decode.write(7)
    deadline = time.monotonic() + 5
    while decode.importer.num_leases:
        assert time.monotonic() < deadline
    decode.importer.abort(7, GONE)  # landed, but the engine has not polled yet
    assert decode.names() == [("Published", 7), ("Freed", 7)]
    assert decode.revokes() == []
    decode.importer.abort(8, GONE)
    assert decode.names() == [("Published", 7), ("Freed", 7)]


def test_an_abort_while_the_digest_is_computed(make_decode, monkeypatch) -> None:
    decode = make_decode("all")
    hold, inside = threading.Event(), threading.Event()
    real = decode.importer._compare

    def slow(landing) -> None:
        inside.set()
        hold.wait(5)
        real(landing)

    monkeypatch.setattr(decode.importer, "_compare", slow)
    decode.publish(7)
    decode.write(7)
    assert inside.wait(5)
    decode.importer.abort(7, GONE)
    assert decode.names() == [("Published", 7), ("Freed", 7)]
    hold.set()
    decode.settle()
    assert decode.names() == [("Published", 7), ("Freed", 7)]
    assert decode.revokes() == [], "the bell was the writer's last write: there is nothing to revoke"


class RecordingHash:
    """Keeps what is asked of it, in order, and by which thread."""

    name = HostPageHash.name

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.threads: dict[str, str] = {}

    def _tell(self, what: str, *arguments: object) -> None:
        self.told.append((what, *arguments))
        self.threads[what] = threading.current_thread().name

    def open(self, extents, first, count, heads=None):
        self._tell("open", list(extents), first, count, heads)
        return self

    def prepare(self) -> None:
        self._tell("prepare")

    def ahead(self, layers, first, count, ready) -> None:
        self._tell("ahead", layers, first, count, ready)

    def value(self) -> int:
        self._tell("value")
        return 11


@pytest.fixture
def recording(make_decode) -> tuple[Decode, RecordingHash]:
    decode, hash_ = make_decode("all"), RecordingHash()
    decode.importer._page_hashes = [hash_]
    return decode, hash_


def test_a_digest_is_prepared_when_its_room_is_published_and_begun_by_the_doorbell(recording) -> None:
    decode, hash_ = recording
    waited: list[float] = []
    decode.importer.on_digest(waited.append)
    decode.publish(7, resident_pages=1)
    decode.importer._checks.submit(int).result(5)
    assert hash_.told == [("open", list(PAGES), 1, 2, None), ("prepare",)]
    decode.write(7, digest=11, has_digest=True)
    decode.until(("Landed", 7))
    assert hash_.told[2:] == [("ahead", range(LAYOUT.num_layers), 0, 2, None), ("value",)]
    decode.importer._checks.submit(int).result(5)
    assert len(waited) == 1
    assert 0 < waited[0] < 5
    assert hash_.threads["prepare"] == hash_.threads["value"] != hash_.threads["ahead"]


def test_a_room_that_lands_before_its_digest_is_prepared_waits_for_it(recording) -> None:
    decode, hash_ = recording
    hold = threading.Event()
    decode.importer._checks.submit(hold.wait, 5)
    decode.publish(7)
    decode.write(7, digest=12, has_digest=True)
    decode.settle()
    assert decode.names() == [("Published", 7)]
    hold.set()
    decode.until(("Freed", 7))
    assert decode.failure(7).cause == "digest_mismatch"
    assert [what for what, *_ in hash_.told] == ["open", "prepare", "value"]


@pytest.mark.parametrize("at", ["open", "prepare", "ahead", "value"])
def test_a_digest_that_fails_ends_its_room_by_name(recording, at, monkeypatch) -> None:
    decode, hash_ = recording

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory on the device")

    monkeypatch.setattr(hash_, at, fails)
    decode.publish(7)
    decode.importer._checks.submit(int).result(5)
    decode.write(7, digest=11, has_digest=True)
    decode.until(("Freed", 7))
    assert decode.failure(7).cause == "digest_failed"
    assert "out of memory on the device" in decode.failure(7).message
    assert ("Landed", 7) not in decode.names()
    monkeypatch.undo()
    decode.publish(8)  # the next one is well
    decode.write(8, digest=11, has_digest=True)
    decode.until(("Landed", 8))


def test_the_digest_of_a_room_that_is_over_is_not_prepared(recording) -> None:
    decode, hash_ = recording
    hold = threading.Event()
    decode.importer._checks.submit(hold.wait, 5)
    decode.publish(7)
    decode.importer.abort(7, GONE)
    decode.importer.quiesced(7, decode.published(7).lease_generation)
    assert decode.names()[-1] == ("Freed", 7)
    hold.set()
    decode.importer._checks.submit(int).result(5)
    assert hash_.told == []


@pytest.mark.parametrize("aborted", [False, True])
def test_declined_frees_at_once(decode, aborted) -> None:
    decode.publish(7)
    if aborted:
        decode.importer.abort(7, GONE)
    decode.importer.declined(7, decode.published(7).lease_generation, Failure("UNAVAILABLE", "prefill", "draining", "no"))
    expected = [("Published", 7), ("Freed", 7)] if aborted else [("Published", 7), ("LandingFailed", 7), ("Freed", 7)]
    assert decode.names() == expected


def test_a_bell_with_another_status_is_a_negative_acknowledgement(decode) -> None:
    decode.publish(7)
    decode.write(7, status=STATUS_DECLINED, first_token=-1)
    decode.until(("LandingFailed", 7), ("Freed", 7))
    assert decode.failure(7).origin == "prefill"


def test_a_lease_is_of_the_pages_that_may_be_written(decode) -> None:
    """Those of a resident prefix are published, so that the order is the prompt's, and are not counted: other rooms share them."""
    decode.publish(7, resident_pages=2)
    told = decode.published(7)
    assert (told.resident_tokens, sum(extent.count for extent in told.pages)) == (2 * LAYOUT.page_size, 3)
    decode.importer.abort(7, GONE)
    decode.importer.tick(time.monotonic() + 1000)
    assert decode.importer.quarantined_pages() == 1
    decode.importer.quiesced(7, told.lease_generation)
    assert decode.importer.quarantined_pages() == 0


def test_a_lost_session_quarantines_until_it_is_fenced(decode) -> None:
    lost = decode.link
    decode.publish(7)
    decode.publish(8)
    decode.importer.abort(8, GONE)
    decode.importer.link_lost(lost, "it died")
    assert decode.importer.quarantined_pages() == 6
    assert decode.names() == [("Published", 7), ("Published", 8), ("LandingFailed", 7)]
    assert (decode.failure(7).code, decode.failure(7).origin, decode.failure(7).cause) == ("UNAVAILABLE", "prefill", "prefill_lost")
    decode.connect()  # it is back: another session, other leases
    decode.publish(9)
    assert not lost.inboxes.fence(None), "its connection is open: no proof"
    assert decode.importer.has_leases(lost)
    decode.importer.link_fenced(lost)
    assert decode.names()[3:] == [("Published", 9), ("Freed", 7), ("Freed", 8)]
    assert not decode.importer.has_leases(lost)
    decode.write(9)
    decode.until(("Landed", 9))


def test_a_late_bell_of_a_lost_session_frees_but_does_not_land(decode) -> None:
    decode.publish(7)
    decode.importer.link_lost(decode.link, "it seemed dead")
    decode.write(7)
    decode.until(("Freed", 7))
    decode.importer.link_fenced(decode.link)
    assert decode.names() == [("Published", 7), ("LandingFailed", 7), ("Freed", 7)]


def test_a_room_waits_for_its_session(decode) -> None:
    del decode.links["p:1"]
    decode.publish(7)
    assert decode.names() == []
    decode.connect()
    decode.importer.link_ready("p:1")
    assert decode.names() == [("Published", 7)]


@pytest.mark.parametrize(
    ("instance_id", "address", "said"), [("prefill-1", "q:2", "it is away"), ("prefill-0", "p:1", "is prefill server prefill-1")]
)
def test_a_session_that_does_not_come(decode, instance_id, address, said) -> None:
    decode.publish(7, instance_id, address)
    decode.importer.tick(time.monotonic() + 4.9)
    assert decode.names() == []
    decode.importer.tick(time.monotonic() + 5.1)
    assert decode.names() == [("LandingFailed", 7), ("Freed", 7)]
    assert (decode.failure(7).cause, decode.failure(7).code) == ("prefill_unreachable", "UNAVAILABLE")
    assert said in decode.failure(7).message


def test_an_abort_while_it_waits_for_a_session(decode) -> None:
    decode.publish(7, address="q:2")
    decode.importer.abort(7, GONE)
    decode.importer.tick(time.monotonic() + 1000)
    assert decode.names() == [("Freed", 7)]


def test_more_rooms_than_doorbells(decode) -> None:
    decode.connect(num_doorbells=1)
    decode.publish(7)
    decode.publish(8)
    assert decode.names() == [("Published", 7), ("LandingFailed", 8), ("Freed", 8)]
    assert decode.failure(8).code == "RESOURCE_EXHAUSTED"
    decode.write(7)
    decode.until(("Landed", 7))
    decode.publish(9)
    assert decode.names()[-1] == ("Published", 9)


def test_a_room_is_single_use(decode) -> None:
    decode.publish(7)
    decode.write(7)
    decode.until(("Landed", 7))
    decode.publish(7)
    assert decode.names()[-2:] == [("LandingFailed", 7), ("Freed", 7)]
    assert decode.failure(7).cause == "room_used"


def test_a_fenced_session_takes_no_publication(decode) -> None:
    decode.link.inboxes.fence(None)
    decode.publish(7)
    assert decode.names() == []
    decode.importer.tick(time.monotonic() + 6)
    assert decode.names() == [("LandingFailed", 7), ("Freed", 7)]


def test_whatever_happens_each_room_ends_once_and_never_before_the_proof(decode) -> None:
    """Random orders of everything: a room's last word is Landed or Freed, said once; Freed never comes while the writer may still write."""
    chance = random.Random(5)
    sessions = [decode.link]
    owner: dict[int, PrefillLink] = {}
    proven: set[int] = set()
    for room in range(1, 400):
        if chance.random() < 0.05:
            sessions.append(decode.connect())
        decode.publish(room)
        owner[room] = decode.link
        generation = decode.published(room).lease_generation
        for step in chance.sample(["abort", "quiesced", "declined", "write", "lost", "fenced", "tick", "stale", "nothing"], k=chance.randrange(1, 5)):
            if step in ("quiesced", "declined", "write"):
                proven.add(room)
            match step:
                case "abort":
                    decode.importer.abort(room, GONE)
                case "quiesced":
                    decode.importer.quiesced(room, generation)
                case "declined":
                    decode.importer.declined(room, generation, GONE)
                case "write":
                    decode.write(room)
                case "lost" if chance.random() < 0.2:
                    decode.importer.link_lost(owner[room], "lost")
                    sessions.append(decode.connect())
                case "fenced" if owner[room] is not decode.link:
                    proven |= {other for other, link in owner.items() if link is owner[room]}
                    decode.importer.link_fenced(owner[room])
                case "tick":
                    decode.importer.tick(time.monotonic() + chance.random() * 4)
                case "stale":
                    decode.importer.quiesced(room, generation + 1)
            ended = {number for name, number in decode.names() if name in ("Freed", "Landed")}
            assert ended <= proven
    decode.settle()
    for link in sessions:
        decode.importer.link_lost(link, "end")
        decode.importer.link_fenced(link)
    names = decode.names()
    ends = [number for name, number in names if name in ("Freed", "Landed")]
    assert sorted(ends) == list(range(1, 400))
    assert decode.importer.num_leases == 0
    assert decode.importer.quarantined_pages() == 0
    failed = [number for name, number in names if name == "LandingFailed"]
    assert len(failed) == len(set(failed))
    assert not {event.room for event in decode.events if isinstance(event, Landed)} & {
        event.room for event in decode.events if isinstance(event, Freed)
    }
