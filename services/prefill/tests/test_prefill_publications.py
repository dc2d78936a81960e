"""Whose publications are believed, how many are kept, and what a bad one does to its room and its session."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from baton.engine.ports import SendDone, SendFailed
from baton.engine.types import Failure
from baton.prefill.errors import BadPublicationError
from baton.wire.v1 import common_pb2


def test_only_the_named_decode_server_is_believed(prefill) -> None:
    right, wrong = prefill.decode("decode-1"), prefill.decode("decode-2")
    prefill.exporter.published(wrong.publish(7, generation=1))
    prefill.exporter.published(right.publish(7, generation=2))
    prefill.expect(7, decode="decode-1")
    assert wrong.said() == [("declined", 7, 1)]
    assert wrong.told[0].declined.failure.cause == "wrong_decode"
    prefill.exporter.published(wrong.publish(7, generation=3))
    assert wrong.said()[1:] == [("declined", 7, 3)]
    prefill.whole(7)
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
    prefill.whole(7)
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
    prefill.whole(9)
    assert isinstance(prefill.until_over(9), SendDone)


def test_two_lengths_for_one_room_fail_both_sides(prefill) -> None:
    decode = prefill.decode()
    prefill.expect(7, num_tokens=11)
    prefill.exporter.published(decode.publish(7))
    failed = prefill.until_over(7)
    assert isinstance(failed, SendFailed)
    assert failed.failure.cause == "length_mismatch"
    assert decode.told[0].declined.failure.cause == "length_mismatch"


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
        prefill.whole(7)
        prefill.exporter.published(publication)
    else:
        prefill.exporter.published(publication)
        prefill.whole(7)
    failed = prefill.until_over(7)
    assert isinstance(failed, SendFailed)
    assert (failed.failure.code, failed.failure.origin, failed.failure.cause) == ("INVALID_ARGUMENT", "decode", "bad_publication")
    prefill.until(lambda: bool(decode.told))
    assert decode.told[0].declined.failure.cause == "bad_publication"
    prefill.expect(8)
    prefill.exporter.published(decode.publish(8))
    prefill.whole(8)
    assert isinstance(prefill.until_over(8), SendDone)


def test_more_pages_than_the_pool_has_are_refused_before_they_are_counted_out(prefill) -> None:
    pages = [common_pb2.Extent(first=0, count=32)] * 2
    with pytest.raises(BadPublicationError, match="pages holds 64 pages, the pool has 32"):
        prefill.decode().publish(7, pages=pages)
