"""Every order in which a request, its publication, its pages, a revocation and a loss can come."""

from __future__ import annotations

import itertools

import pytest

from baton.engine.ports import PublishedSlots, SendDone, SendFailed
from baton.engine.types import Extent, Failure
from baton.kvtransfer import digest
from baton.workerkit.runs import digest_runs, slice_pages


def test_pages_land_where_decode_said_and_the_bell_rings_last(prefill) -> None:
    decode = prefill.decode()
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, generation=9))
    prefill.whole(7)
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
        prefill.whole(7)
        steps["publish"]()
    else:
        steps[order[1]]()
        prefill.whole(7)
    assert isinstance(prefill.until_over(7), SendDone)
    prefill.until(lambda: bool(decode.bells))
    assert decode.page(1, True, 3) == prefill.page(1, True, 7)


def test_pages_that_decode_holds_already_are_not_written(prefill, target) -> None:
    decode = prefill.decode()
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, resident_tokens=8, digest=True))
    prefill.whole(7)
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
    prefill.whole(7)
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
    prefill.whole(8)
    assert isinstance(prefill.until_over(8), SendDone)
    prefill.exporter.revoked(decode.link, 8, 5, gone)  # written already
    assert decode.said() == [("quiesced", 99, 1), ("quiesced", 7, 2), ("quiesced", 8, 5)]


def test_a_revocation_of_another_generation_stops_nothing(prefill, gone) -> None:
    decode = prefill.decode()
    prefill.expect(7)
    prefill.exporter.published(decode.publish(7, generation=3))
    prefill.exporter.revoked(decode.link, 7, 2, gone)
    prefill.whole(7)
    assert isinstance(prefill.until_over(7), SendDone)


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
