"""When each post of a write was on its way, over every backend."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from baton.kvtransfer import Doorbell, WriteState
from baton.kvtransfer.base import MAX_PARTS

PAGE = 4096
NUM_BYTES = 256 * PAGE


@pytest.fixture
def pair(house: Any) -> Any:
    sender, receiver = house.local(num_bytes=NUM_BYTES), house.remote(num_bytes=NUM_BYTES)
    inbox, invitation = receiver.open_inbox()
    return sender, receiver, inbox, sender.agent.connect(invitation, sender.region)


def scattered(pages: range) -> Any:
    """Spans that nothing merges."""
    return np.array([(page * PAGE, (255 - page) * PAGE, PAGE) for page in pages], dtype=np.int64)


def test_each_post_has_its_time_and_its_bytes(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    handle = peer.begin(1)
    sizes = (3, 1, 40, 7)
    posted_ns = []
    for number, size in enumerate(sizes):
        time.sleep(0.05)
        posted_ns.append(time.monotonic_ns())
        handle.post(scattered(range(50 * number, 50 * number + size)))
    assert handle.parts().shape == (0, 3)
    handle.finish(receiver.arm(inbox, 1, 1), Doorbell(1, 1))
    assert sender.state(1) is WriteState.DONE
    parts = handle.parts()
    assert parts[:, 2].tolist() == [size * PAGE for size in sizes]
    assert parts[:, 2].sum() == handle.num_bytes
    assert (parts[:, 0] <= parts[:, 1]).all()
    assert (parts[:, 0] >= np.array(posted_ns)).all()
    assert (parts[:, 1] <= handle.done_time * 1e9 + 1e3).all()
    assert (np.diff(parts[:, 1]) >= 0).all()
    assert parts[0, 0] <= handle.first_post_time * 1e9 + 1e3


def test_what_was_posted_at_once_is_apart_all_the_same(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    handle = peer.begin(1)
    for page in range(200):
        handle.post(scattered(range(page, page + 1)))
    handle.finish(receiver.arm(inbox, 1, 1), Doorbell(1, 1))
    assert sender.state(1) is WriteState.DONE
    parts = handle.parts()
    assert parts[:, 2].tolist() == [PAGE] * 200
    assert (np.diff(parts[:, 0]) >= 0).all()
    assert (parts[:, 0] <= parts[:, 1]).all()


def test_the_last_row_stands_for_what_is_too_much(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    handle = peer.begin(1)
    for number in range(MAX_PARTS + 50):
        handle.post(scattered(range(number % 256, number % 256 + 1)))
    handle.finish(receiver.arm(inbox, 1, 1), Doorbell(1, 1))
    assert sender.state(1) is WriteState.DONE
    parts = handle.parts()
    assert len(parts) == MAX_PARTS
    assert parts[:-1, 2].tolist() == [PAGE] * (MAX_PARTS - 1)
    assert parts[-1, 2] == 51 * PAGE
    assert 0 < parts[-1, 0] <= parts[-1, 1] <= handle.done_time * 1e9 + 1e3


def test_a_write_that_was_cancelled_has_none(pair: Any) -> None:
    sender, _, _, peer = pair
    handle = peer.begin(1)
    handle.post(scattered(range(10)))
    handle.cancel()
    assert sender.state(1) is WriteState.QUIESCED
    assert len(handle.parts()) == 0
