"""Every order in which a doorbell, an abort, an answer, a loss and a fence can come, over the loopback backend."""

from __future__ import annotations

import random
import time

import pytest
from decode_half import GONE, LAYOUT, NUM_TOKENS

from baton.decode.link import PrefillLink
from baton.engine.ports import Freed, Landed
from baton.engine.types import Failure
from baton.kvtransfer import STATUS_DECLINED


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
