"""Every order in which a request, its publication, its pages, a revocation and a loss can come."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from baton.engine.ports import PublishedSlots, SendDone, SendFailed
from baton.engine.types import Extent, Failure
from baton.kvtransfer import digest
from baton.prefill import exporter as exporter_module
from baton.prefill.errors import BadPublicationError
from baton.wire.v1 import common_pb2
from baton.workerkit import HostPageHash
from baton.workerkit.runs import digest_runs, slice_pages


def whole(prefill, room: int) -> None:
    prefill.start(room)
    prefill.compute(room)
    prefill.exporter.finish(room, 42)


def test_pages_land_where_decode_said_and_the_bell_rings_last(prefill) -> None:
    decode = prefill.decode()
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, generation=9))
    whole(prefill, 7)
    done = prefill.until_over(7)
    assert isinstance(done, SendDone)
    assert prefill.names() == [("PublishedSlots", 7), ("SendStarted", 7), ("SendDone", 7)]
    prefill.until(lambda: bool(decode.bells))
    (bell,) = decode.bells
    assert (bell.room, bell.generation, bell.num_tokens, bell.first_token, bell.has_digest) == (7, 9, 10, 42, False)
    for layer, values in itertools.product((0, 1), (False, True)):
        for source, target in ((5, 20), (6, 21), (7, 3)):
            assert prefill.page(layer, values, source) == decode.page(layer, values, target)
    assert (done.stats.num_bytes, done.stats.num_puts, done.stats.transport) == (3 * 4 * 64, 8, "loopback")
    assert done.stats.duration_s > 0
    assert 0 <= done.stats.exposed_s < 5
    assert decode.said() == []
    assert prefill.exporter.num_rooms == 0


@pytest.mark.parametrize("order", list(itertools.permutations(["expect", "publish"])))
@pytest.mark.parametrize("computed_first", [False, True])
def test_request_publication_and_pages_in_any_order(prefill, order, computed_first) -> None:
    decode = prefill.decode()
    steps = {"expect": lambda: prefill.expect(7), "publish": lambda: prefill.exporter.published(decode.publish(7))}
    steps[order[0]]()
    if computed_first and order[0] == "expect":  # everything is computed before decode says where it goes
        whole(prefill, 7)
        steps["publish"]()
    else:
        steps[order[1]]()
        whole(prefill, 7)
    assert isinstance(prefill.until_over(7), SendDone)
    prefill.until(lambda: bool(decode.bells))
    assert decode.page(1, True, 3) == prefill.page(1, True, 7)


def test_pages_that_decode_holds_already_are_not_written(prefill, target) -> None:
    decode = prefill.decode()
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, resident_tokens=8, digest=True))
    whole(prefill, 7)
    done = prefill.until_over(7)
    assert prefill.events[0] == PublishedSlots(7, 8)
    assert isinstance(done, SendDone)
    assert done.stats.num_bytes == 1 * 4 * 64
    assert decode.page(0, False, 20) == bytes(64)
    prefill.until(lambda: bool(decode.bells))
    extents = slice_pages([Extent(20, 2), Extent(3, 1)], 2, 1)
    assert extents == [Extent(3, 1)]
    assert decode.bells[0].digest == digest(decode.region, digest_runs(target, extents, 0, 1))


def test_a_prompt_that_decode_holds_whole_only_rings_the_bell(prefill) -> None:
    decode = prefill.decode()
    prefill.expect(7, num_tokens=8)
    prefill.exporter.published(decode.publish(7, num_tokens=8, resident_tokens=8))
    prefill.exporter.start(7, [Extent(5, 2)], 8)
    prefill.exporter.finish(7, 42)
    done = prefill.until_over(7)
    assert prefill.names() == [("PublishedSlots", 7), ("SendStarted", 7), ("SendDone", 7)]
    assert isinstance(done, SendDone)
    assert (done.stats.num_bytes, done.stats.duration_s) == (0, 0.0)
    assert done.stats.exposed_s < 5


def test_publications_that_await_their_request_are_told_and_the_first_one_is_known(prefill) -> None:
    told: list[tuple[int, str]] = []
    prefill.exporter.on_unclaimed(lambda room, decode: told.append((room, decode)))
    one, other = prefill.decode("decode-1"), prefill.decode("decode-2")
    prefill.expect(6)
    prefill.exporter.published(one.publish(6))
    assert told == []  # its request was here
    for decode in (one, other, one):  # the last one twice
        prefill.exporter.published(decode.publish(7))
    assert told == [(7, "decode-1"), (7, "decode-2")]
    assert (prefill.exporter.publisher(7), prefill.exporter.publisher(6)) == ("decode-1", "")
    prefill.exporter.revoked(one.link, 7, 1, Failure("CANCELLED", "client", "gone", ""))
    assert prefill.exporter.publisher(7) == "decode-2"
    prefill.exporter.refuse(7, Failure("CANCELLED", "client", "gone", ""))
    assert prefill.exporter.publisher(7) == ""
    prefill.exporter.published(one.publish(7, generation=2))
    assert told[2:] == []  # it was declined


def test_a_digest_of_another_kind_is_declined_before_a_byte_is_written(prefill) -> None:
    decode = prefill.decode()
    decode.link.page_hash = "nh64-pages"
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, digest=True))
    over = prefill.until_over(7)
    assert isinstance(over, SendFailed)
    assert over.failure.cause == "page_hash"
    assert [kind for kind, _, _ in decode.said()] == ["declined"]
    assert prefill.names() == [("SendFailed", 7)]


def test_the_digest_is_that_of_the_landed_bytes(prefill, target) -> None:
    decode = prefill.decode()
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, digest=True))
    whole(prefill, 7)
    assert isinstance(prefill.until_over(7), SendDone)
    prefill.until(lambda: bool(decode.bells))
    landed = digest(decode.region, digest_runs(target, [Extent(20, 2), Extent(3, 1)], 0, 3))
    assert decode.bells[0].has_digest
    assert decode.bells[0].digest == landed


def test_an_abort_before_the_publication_declines_it_when_it_comes(prefill, gone) -> None:
    decode = prefill.decode()
    prefill.expect(7)
    prefill.exporter.abort(7, gone)
    prefill.exporter.abort(7, gone)
    assert prefill.names() == [("SendFailed", 7)]
    prefill.exporter.published(decode.publish(7, generation=4))
    assert decode.said() == [("declined", 7, 4)]
    assert decode.told[0].declined.failure.cause == "client_gone"


def test_an_abort_in_mid_transfer_declines_once_it_is_quiesced(prefill, gone) -> None:
    decode = prefill.decode()
    prefill.agent.paused = True
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7))
    prefill.start(7)
    prefill.compute(7)
    prefill.exporter.abort(7, gone)
    prefill.compute(7)  # what the engine still computes is not posted
    prefill.exporter.finish(7, 42)
    assert decode.said() == []
    assert ("SendFailed", 7) not in prefill.names()
    prefill.agent.paused = False
    failed = prefill.until_over(7)
    assert isinstance(failed, SendFailed)
    assert failed.failure == gone
    assert decode.said() == [("declined", 7, 1)]
    assert decode.bells == []


def test_a_revocation_in_mid_transfer_is_answered_once_it_is_quiesced(prefill, gone) -> None:
    decode = prefill.decode()
    prefill.agent.paused = True
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, generation=3))
    prefill.start(7)
    prefill.compute(7)
    prefill.exporter.revoked(decode.link, 7, 3, gone)
    prefill.exporter.revoked(decode.link, 7, 3, gone)
    assert decode.said() == []
    prefill.agent.paused = False
    assert isinstance(prefill.until_over(7), SendFailed)
    assert decode.said() == [("quiesced", 7, 3)]


def test_a_revocation_of_what_is_not_written_is_answered_at_once(prefill, gone) -> None:
    decode = prefill.decode()
    prefill.exporter.revoked(decode.link, 99, 1, gone)  # never heard of
    prefill.exporter.published(decode.publish(7, generation=2))
    prefill.exporter.revoked(decode.link, 7, 2, gone)  # published, no request yet
    assert prefill.exporter.num_unmatched == 0
    prefill.expect(8)
    prefill.exporter.published(decode.publish(8, generation=5))
    whole(prefill, 8)
    assert isinstance(prefill.until_over(8), SendDone)
    prefill.exporter.revoked(decode.link, 8, 5, gone)  # written already
    assert decode.said() == [("quiesced", 99, 1), ("quiesced", 7, 2), ("quiesced", 8, 5)]


def test_a_revocation_of_another_generation_stops_nothing(prefill, gone) -> None:
    decode = prefill.decode()
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, generation=3))
    prefill.exporter.revoked(decode.link, 7, 2, gone)
    whole(prefill, 7)
    assert isinstance(prefill.until_over(7), SendDone)


def test_only_the_named_decode_server_is_believed(prefill) -> None:
    right, wrong = prefill.decode("decode-1"), prefill.decode("decode-2")
    prefill.exporter.published(wrong.publish(7, generation=1))
    prefill.exporter.published(right.publish(7, generation=2))
    prefill.expect(7, decode="decode-1")
    assert wrong.said() == [("declined", 7, 1)]
    assert wrong.told[0].declined.failure.cause == "wrong_decode"
    prefill.exporter.published(wrong.publish(7, generation=3))
    assert wrong.said()[1:] == [("declined", 7, 3)]
    whole(prefill, 7)
    assert isinstance(prefill.until_over(7), SendDone)
    assert right.said() == []
    assert wrong.page(0, False, 20) == bytes(64)


def test_a_room_is_published_once(prefill) -> None:
    decode = prefill.decode()
    prefill.exporter.published(decode.publish(7, generation=1))
    prefill.exporter.published(decode.publish(7, generation=2))
    assert decode.said() == [("declined", 7, 2)]
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, generation=3))
    assert decode.said() == [("declined", 7, 2), ("declined", 7, 3)]
    whole(prefill, 7)
    assert isinstance(prefill.until_over(7), SendDone)
    prefill.exporter.published(decode.publish(7, generation=4))
    assert decode.told[-1].declined.failure.cause == "room_used"


def test_publications_that_nobody_claims_are_bounded_and_expire(prefill) -> None:
    decode = prefill.decode()
    for room in (1, 2, 3, 4):
        prefill.exporter.published(decode.publish(room))
    assert decode.said() == [("declined", 4, 1)]
    assert decode.told[0].declined.failure.cause == "too_many_unmatched"
    prefill.exporter.expire(time.monotonic() + 4.9)
    assert prefill.exporter.num_unmatched == 3
    prefill.exporter.expire(time.monotonic() + 5.1)
    assert prefill.exporter.num_unmatched == 0
    assert [message.declined.failure.cause for message in decode.told[1:]] == ["room_unclaimed"] * 3


def test_a_request_refused_at_intake_declines_its_publication(prefill) -> None:
    refusal = Failure("UNAVAILABLE", "prefill", "draining", "no")
    decode = prefill.decode()
    prefill.exporter.published(decode.publish(7))
    prefill.exporter.refuse(7, refusal)
    prefill.exporter.refuse(8, refusal)
    prefill.exporter.published(decode.publish(8))
    assert decode.said() == [("declined", 7, 1), ("declined", 8, 1)]
    prefill.expect(9)
    prefill.exporter.refuse(9, refusal)  # a forged second request for an open room changes nothing
    prefill.exporter.published(decode.publish(9))
    whole(prefill, 9)
    assert isinstance(prefill.until_over(9), SendDone)


def test_two_lengths_for_one_room_fail_both_sides(prefill) -> None:
    decode = prefill.decode()
    prefill.expect(7, num_tokens=11)
    prefill.exporter.published(decode.publish(7))
    failed = prefill.until_over(7)
    assert isinstance(failed, SendFailed)
    assert failed.failure.cause == "length_mismatch"
    assert decode.told[0].declined.failure.cause == "length_mismatch"


def test_a_lost_session_ends_its_rooms_and_no_others(prefill) -> None:
    lost, other = prefill.decode("decode-1"), prefill.decode("decode-2")
    prefill.agent.paused = True
    for room, decode in ((7, lost), (8, other)):
        prefill.expect(room, decode.link.instance_id)
        prefill.exporter.published(decode.publish(room))
        prefill.start(room)
        prefill.compute(room)
    prefill.exporter.published(lost.publish(9))
    prefill.exporter.link_closing(lost.link, "it died")
    assert ("SendFailed", 7) not in prefill.names(), "source pages are read until the peer is closed"
    prefill.agent.paused = False
    lost.peer.close()
    prefill.exporter.link_closed(lost.link)
    failed = prefill.until_over(7)
    assert isinstance(failed, SendFailed)
    assert (failed.failure.cause, failed.failure.origin) == ("decode_lost", "decode")
    assert prefill.exporter.num_unmatched == 0
    prefill.exporter.finish(8, 1)
    assert isinstance(prefill.until_over(8), SendDone)
    assert [event.room for event in prefill.events if isinstance(event, SendFailed)] == [7]


def test_a_broken_path_is_no_proof_and_ends_the_session(prefill, gone) -> None:
    decode = prefill.decode()
    prefill.agent.paused = True
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7))
    prefill.start(7)
    prefill.compute(7)
    prefill.agent.lose(decode.peer)
    prefill.until(lambda: bool(decode.failed))
    prefill.exporter.revoked(decode.link, 7, 1, gone)
    assert decode.said() == [], "Quiesced would be a lie: what was posted may still land"
    prefill.exporter.link_closing(decode.link, "broken")
    prefill.exporter.link_closed(decode.link)
    assert isinstance(prefill.until_over(7), SendFailed)


def test_a_publication_through_a_dead_peer_fails_at_once(prefill) -> None:
    decode = prefill.decode()
    decode.peer.close()
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7))
    failed = prefill.until_over(7)
    assert isinstance(failed, SendFailed)
    assert failed.failure.cause == "decode_lost"
    assert decode.failed


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_tokens": 13}, "3 pages, num_tokens=13 needs 4"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"pages": [common_pb2.Extent(first=30, count=3)]}, r"\[30, 33\) is outside the pool of 32 pages"),
        ({"resident_tokens": 3}, "resident_tokens=3 must be a multiple of the page size 4"),
        ({"resident_tokens": 12}, "at most num_tokens=10"),
    ],
)
def test_a_bad_publication_is_named_and_ends_the_room(prefill, more, said) -> None:
    decode = prefill.decode()
    prefill.expect(7)
    with pytest.raises(BadPublicationError, match=said) as caught:
        decode.publish(7, **more)
    prefill.exporter.reject(decode.link, 7, 1, caught.value)
    assert decode.said() == [("declined", 7, 1)]
    failed = prefill.until_over(7)
    assert isinstance(failed, SendFailed)
    assert failed.failure.cause == "bad_publication"


@pytest.mark.parametrize("computed_first", [False, True])
@pytest.mark.parametrize("wrong", [{"doorbells": (10**6,)}, {"pages": np.array([20, 10**6, 3])}], ids=["doorbell", "pages"])
def test_a_publication_outside_of_its_invitation_ends_its_room_and_nothing_else(prefill, wrong, computed_first) -> None:
    """A decode server that says one number of pages or doorbells and invites to another: no call of the engine may raise."""
    decode = prefill.decode()
    prefill.expect(7)
    publication = replace(decode.publish(7), **wrong)
    if computed_first:
        whole(prefill, 7)
        prefill.exporter.published(publication)
    else:
        prefill.exporter.published(publication)
        whole(prefill, 7)
    failed = prefill.until_over(7)
    assert isinstance(failed, SendFailed)
    assert (failed.failure.code, failed.failure.origin, failed.failure.cause) == ("INVALID_ARGUMENT", "decode", "bad_publication")
    prefill.until(lambda: bool(decode.told))
    assert decode.told[0].declined.failure.cause == "bad_publication"
    prefill.expect(8)
    prefill.exporter.published(decode.publish(8))
    whole(prefill, 8)
    assert isinstance(prefill.until_over(8), SendDone)


def test_more_pages_than_the_pool_has_are_refused_before_they_are_counted_out(prefill) -> None:
    pages = [common_pb2.Extent(first=0, count=32)] * 2
    with pytest.raises(BadPublicationError, match="pages holds 64 pages, the pool has 32"):
        prefill.decode().publish(7, pages=pages)


class RecordingHash:
    """A page hash that keeps what it was told was complete."""

    name = HostPageHash.name

    def __init__(self, inner: HostPageHash) -> None:
        self.inner, self.told = inner, []

    def open(self, extents, first, count, heads=None):
        self.opened = (list(extents), first, count, heads)
        digest = self.inner.open(extents, first, count, heads)
        digest.ahead = lambda *told: self.told.append(told)
        return digest


def test_device_memory_is_digested_while_later_layers_are_computed(prefill, target, monkeypatch) -> None:
    """Two chunks, of which the second fills the last page of the first; the first page is resident and nobody's to digest."""
    monkeypatch.setattr(exporter_module, "LAYERS_DIGESTED_AT_ONCE", 1)
    monkeypatch.setattr(exporter_module, "_cuda_events", lambda ready: ())  # host memory here
    recording = RecordingHash(HostPageHash(prefill.layout, partial(digest, prefill.region)))
    prefill.exporter._rooms._page_hashes = [recording]
    decode = prefill.decode()
    prefill.expect(7)
    prefill.start(7)
    prefill.exporter.published(decode.publish(7, resident_tokens=4, digest=True))
    events = [[object() for _ in range(prefill.layout.num_layers)] for _ in range(2)]
    for chunk, (first, count) in enumerate(((0, 2), (1, 2))):
        for layer in range(prefill.layout.num_layers):
            prefill.exporter.layer_done(layer, [(7, first, count)], events[chunk][layer])
    prefill.exporter.finish(7, 42)
    assert isinstance(prefill.until_over(7), SendDone)
    assert recording.opened == ([Extent(5, 3)], 1, 2, None)
    assert recording.told == [
        (range(1), 0, 1, events[0][0]),
        (range(1, 2), 0, 1, events[0][1]),
        (range(1), 0, 2, events[1][0]),
        (range(1, 2), 0, 2, events[1][1]),
    ]
    prefill.until(lambda: bool(decode.bells))
    assert decode.bells[0].digest == digest(decode.region, digest_runs(target, slice_pages([Extent(20, 2), Extent(3, 1)], 1, 2), 0, 2))


class DigestReadAhead:
    """Whose value is there as soon as the last layer was read."""

    name = HostPageHash.name

    def __init__(self, last_layer: int) -> None:
        self.last_layer, self.go_on, self.threads, self.last_read = last_layer, threading.Event(), [], ""

    def open(self, extents, first, count, heads=None):
        return self

    def ahead(self, layers, first, count, ready) -> None:
        assert self.go_on.wait(5)
        if self.last_layer in layers:
            self.last_read = ready

    def is_ready(self) -> bool:
        return bool(self.last_read)

    def value(self) -> int:
        self.threads.append(threading.current_thread())
        return {"first chunk": 1, "second chunk": 2}[self.last_read]


def whole_chunk(prefill, ready: str) -> None:
    for layer in range(prefill.layout.num_layers):
        prefill.exporter.layer_done(layer, [(7, 0, 3)], ready)


@pytest.fixture
def read_ahead(prefill, monkeypatch) -> DigestReadAhead:
    monkeypatch.setattr(exporter_module, "LAYERS_DIGESTED_AT_ONCE", 1)
    monkeypatch.setattr(exporter_module, "_cuda_events", lambda ready: ())  # host memory here
    hash_ = DigestReadAhead(prefill.layout.num_layers - 1)
    prefill.exporter._rooms._page_hashes = [hash_]
    prefill.expect(7)
    prefill.start(7)
    return hash_


def published_and_read(prefill, read_ahead):
    """The decode server; the room's first chunk is computed and its digest read."""
    decode = prefill.decode()
    prefill.exporter.published(decode.publish(7, digest=True))
    read_ahead.go_on.set()
    whole_chunk(prefill, "first chunk")
    prefill.exporter._digests.submit(int).result(5)
    return decode


def test_a_digest_that_is_there_waits_for_no_thread(prefill, read_ahead) -> None:
    decode = published_and_read(prefill, read_ahead)
    hold, waited = threading.Event(), []
    prefill.exporter.on_digest(waited.append)
    prefill.exporter._digests.submit(hold.wait, 5)  # another room's digest
    prefill.exporter.finish(7, 42)
    assert isinstance(prefill.until_over(7), SendDone)
    hold.set()
    assert read_ahead.threads == [threading.current_thread()]
    assert len(waited) == 1
    assert 0 < waited[0] < 5
    prefill.until(lambda: bool(decode.bells))
    assert decode.bells[0].digest == 1


def test_a_digest_is_not_there_while_pages_that_came_again_are_to_be_read(prefill, read_ahead) -> None:
    decode = published_and_read(prefill, read_ahead)
    read_ahead.go_on.clear()
    whole_chunk(prefill, "second chunk")
    prefill.exporter.finish(7, 42)
    read_ahead.go_on.set()
    assert isinstance(prefill.until_over(7), SendDone)
    prefill.until(lambda: bool(decode.bells))
    assert decode.bells[0].digest == 2
    assert read_ahead.threads != [threading.current_thread()]
