"""What every backend does. One suite; over UCX the receiver is another process."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest

import baton.kvtransfer as kv
from baton.kvtransfer import AgentConfig, Doorbell, WriteState

PAGE = 4096
NUM_BYTES = 256 * PAGE
GUARD = 0xA5


@pytest.fixture
def pair(house: Any) -> Any:
    sender = house.local(num_bytes=NUM_BYTES)
    receiver = house.remote(num_bytes=NUM_BYTES, fill=GUARD)
    sender.write(0, np.random.default_rng(7).integers(0, 256, NUM_BYTES, dtype=np.uint8).tobytes())
    inbox, invitation = receiver.open_inbox()
    peer = sender.agent.connect(invitation, sender.region)
    return sender, receiver, inbox, peer


def rows(*spans: tuple[int, int, int]) -> Any:
    return np.array(spans, dtype=np.int64).reshape(-1, 3)


def test_scattered_pages_land_where_they_belong_and_nowhere_else(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    order = np.random.default_rng(3).permutation(256)[:100]
    slot = receiver.arm(inbox, 41, 1)
    handle = peer.begin(41)
    for part in np.array_split(np.arange(100), 7):
        handle.post(np.stack([part * PAGE, order[part] * PAGE, np.full(len(part), PAGE)], axis=1))
    handle.finish(slot, Doorbell(41, 1, num_tokens=1600, first_token=17, digest=99, has_digest=True, last_layer_ns=5))
    assert receiver.doorbells(1) == [Doorbell(41, 1, num_tokens=1600, first_token=17, digest=99, has_digest=True, last_layer_ns=5)]
    assert sender.state(41) is WriteState.DONE
    assert handle.num_bytes == 100 * PAGE
    assert handle.first_post_time <= handle.done_time <= time.monotonic()
    assert receiver.digest([(int(page) * PAGE, PAGE) for page in order]) == kv.digest(sender.region, [(0, 100 * PAGE)])
    landed = np.frombuffer(receiver.read(0, NUM_BYTES), dtype=np.uint8).reshape(256, PAGE)
    untouched = np.setdiff1d(np.arange(256), order)
    assert (landed[untouched] == GUARD).all()


def test_more_than_the_caches_hold_lands_whole_between_its_guards(house: Any) -> None:
    """Such writes go past the caches, a line at a time: their ends, and spans shorter than a line, are where that could go wrong."""
    num_bytes = 72 << 20
    sender = house.local(num_bytes=num_bytes)
    receiver = house.remote(num_bytes=num_bytes, fill=GUARD)
    sender.write(0, np.random.default_rng(11).integers(0, 256, num_bytes, dtype=np.uint8).tobytes())
    inbox, invitation = receiver.open_inbox()
    peer = sender.agent.connect(invitation, sender.region)
    spans = [
        (5, 3, 33 << 20),
        (40 << 20, (34 << 20) + 64, (30 << 20) + 1),
        (1, (70 << 20) + 7, 50),
        (100, (71 << 20) + 63, 2),
        (200, (71 << 20) + 128, 191),
    ]
    slot = receiver.arm(inbox, 1, 1)
    handle = peer.begin(1)
    handle.post(rows(*spans))
    handle.finish(slot, Doorbell(1, 1))
    assert receiver.doorbells(1)
    landed = [(destination, length) for _, destination, length in spans]
    assert receiver.digest(landed) == kv.digest(sender.region, [(source, length) for source, _, length in spans])
    for _, destination, length in spans:
        assert receiver.read(destination - 3, 3) == receiver.read(destination + length, 3) == bytes([GUARD] * 3)


def test_nothing_is_missing_where_nothing_went(pair: Any) -> None:
    _, receiver, inbox, peer = pair
    assert peer.check()
    assert (peer.missing, receiver.missing(inbox)) == ("", "")


def test_bytes_are_there_when_the_doorbell_is(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    for room in range(1, 200):
        slot = receiver.arm(inbox, room, room)
        sender.write(0, room.to_bytes(8, "little") * 512)
        handle = peer.begin(room)
        handle.post(rows((0, 0, PAGE)))
        handle.finish(slot, Doorbell(room, room))
        assert receiver.doorbells(room)[-1].room == room
        assert receiver.read(0, PAGE) == room.to_bytes(8, "little") * 512
        assert sender.state(room) is WriteState.DONE
        receiver.disarm(inbox, slot)


def test_the_time_of_writing_leaves_out_the_callers_pauses(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    handle = peer.begin(1)
    handle.post(rows((0, 0, PAGE)))
    time.sleep(0.3)
    handle.post(rows((PAGE, 3 * PAGE, PAGE)))
    handle.finish(receiver.arm(inbox, 1, 1), Doorbell(1, 1))
    assert sender.state(1) is WriteState.DONE
    window_s = handle.done_time - handle.first_post_time
    assert window_s > 0.2  # the pause, less what the first put was late
    assert 0 < handle.busy_s <= window_s - 0.15


def test_adjacent_spans_become_one_put(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    handle = peer.begin(1)
    handle.post(rows((0, PAGE, PAGE), (PAGE, 2 * PAGE, PAGE), (2 * PAGE, 3 * PAGE, PAGE), (3 * PAGE, 8 * PAGE, PAGE)))
    handle.finish(receiver.arm(inbox, 1, 1), Doorbell(1, 1))
    assert sender.state(1) is WriteState.DONE
    assert (handle.num_puts, handle.num_bytes) == (2, 4 * PAGE)


@pytest.mark.parametrize(
    "bad",
    [(-1, 0, PAGE), (0, -1, PAGE), (0, 0, 0), (0, 0, -PAGE), (NUM_BYTES - 1, 0, 2), (0, NUM_BYTES - 1, 2), (0, 0, 2**62), (2**62, 2**62, 2**62)],
)
def test_a_span_outside_a_region_is_refused_with_its_numbers_and_nothing_is_written(pair: Any, bad: tuple[int, int, int]) -> None:
    _sender, receiver, inbox, peer = pair
    handle = peer.begin(1)
    with pytest.raises(kv.InvalidArgument, match=re.escape(f"spans[1] = {list(bad)}")):
        handle.post(rows((0, 0, PAGE), bad))
    handle.finish(receiver.arm(inbox, 1, 1), Doorbell(1, 1))
    receiver.doorbells(1)
    assert handle.num_bytes == 0
    assert receiver.read(0, PAGE) == bytes([GUARD]) * PAGE


def test_a_malformed_list_of_spans_is_refused(pair: Any) -> None:
    handle = pair[3].begin(1)
    with pytest.raises(kv.InvalidArgument, match=r"shape \(2, 2\)"):
        handle.post(np.zeros((2, 2), dtype=np.int64))
    handle.post(np.zeros((0, 3), dtype=np.int64))  # nothing is something to post


def test_cancel_quiesces_without_a_doorbell(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    receiver.arm(inbox, 1, 1)
    handle = peer.begin(1)
    handle.post(rows((0, 0, PAGE)))
    handle.cancel()
    handle.cancel()
    assert sender.state(1) is WriteState.QUIESCED
    for act in (lambda: handle.post(rows((0, 0, PAGE))), lambda: handle.finish(0, Doorbell(1, 1))):
        with pytest.raises(kv.Closed, match="room 1"):
            act()
    assert receiver.doorbells(1, 0.05) == []


def test_nothing_lands_after_quiesced(pair: Any) -> None:
    sender, receiver, _, peer = pair
    for room in range(1, 20):
        handle = peer.begin(room)
        handle.post(np.repeat(rows((0, 0, 64 * PAGE)), 50, axis=0))
        handle.cancel()
        assert sender.state(room) is WriteState.QUIESCED
        receiver.write(0, bytes([GUARD]) * 64 * PAGE)
        time.sleep(0.002)
        assert receiver.read(0, 64 * PAGE) == bytes([GUARD]) * 64 * PAGE


def test_finish_comes_once(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    handle = peer.begin(1)
    handle.finish(receiver.arm(inbox, 1, 1), Doorbell(1, 1))
    with pytest.raises(kv.Closed):
        handle.finish(0, Doorbell(1, 1))
    assert sender.state(1) is WriteState.DONE
    handle.cancel()  # too late: no effect
    assert handle.state is WriteState.DONE
    with pytest.raises(kv.Closed):
        handle.post(rows((0, 0, PAGE)))


def test_every_handle_is_reported_once(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    for room in range(1, 41):
        handle = peer.begin(room)
        handle.post(rows((0, 0, PAGE)))
        handle.cancel() if room % 2 else handle.finish(receiver.arm(inbox, room, 1), Doorbell(room, 1))
    for room in range(1, 41):
        sender.state(room)
    time.sleep(0.05)
    assert sorted(sender.final) == [(room, "quiesced" if room % 2 else "done") for room in range(1, 41)]
    assert sorted(bell.room for bell in receiver.doorbells(20)) == list(range(2, 41, 2))


def test_a_doorbell_of_another_generation_or_room_is_counted_and_not_reported(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    slot = receiver.arm(inbox, 5, 2)
    for handle_room, forged in ((1, Doorbell(5, 1)), (2, Doorbell(6, 2))):
        handle = peer.begin(handle_room)
        handle.finish(slot, forged)
        assert sender.state(handle_room) is WriteState.DONE
        time.sleep(0.03)
    assert receiver.doorbells(1, 0.05) == []
    assert receiver.stats(inbox).num_stale == 2
    peer.begin(5).finish(slot, Doorbell(5, 2, status=kv.STATUS_DECLINED))
    assert receiver.doorbells(1) == [Doorbell(5, 2, status=kv.STATUS_DECLINED)]


def test_doorbells_are_bounded_and_come_back(house: Any) -> None:
    receiver = house.local("receiver")
    inbox = receiver.agent.open_inbox("sender", receiver.region, 2)
    slots = [inbox.arm(1, 1), inbox.arm(2, 1)]
    assert sorted(slots) == [0, 1]
    with pytest.raises(kv.DoorbellsExhausted, match="2 doorbells"):
        inbox.arm(3, 1)
    inbox.disarm(slots[0])
    assert inbox.arm(3, 1) == slots[0]
    for bad in (-1, 2):
        with pytest.raises(kv.InvalidArgument):
            inbox.disarm(bad)
    for room, generation in ((0, 1), (1, 0), (1 << 64, 1), (1, 1 << 32)):
        with pytest.raises(kv.InvalidArgument):
            inbox.arm(room, generation)


def test_closing_a_peer_quiesces_what_is_open(pair: Any) -> None:
    sender, receiver, _, peer = pair
    open_handle = peer.begin(1)
    open_handle.post(rows((0, 0, PAGE)))
    peer.close()
    peer.close()
    assert open_handle.state is WriteState.QUIESCED
    receiver.write(0, bytes([GUARD]) * PAGE)
    with pytest.raises(kv.Closed):
        peer.begin(2)
    assert sender.state(1) is WriteState.QUIESCED


def test_a_fence_after_an_orderly_close_needs_no_identity_and_lasts(pair: Any) -> None:
    sender, receiver, inbox, peer = pair
    _, invitation = receiver.open_inbox("sender")
    peer.close()
    assert receiver.fence(inbox) is True
    assert receiver.fence(inbox) is True
    with pytest.raises(Exception, match="fenced"):
        receiver.arm(inbox, 1, 1)
    other = sender.agent.connect(invitation, sender.region)  # one inbox was fenced, the other one was not
    assert not other.is_lost


def test_a_fenced_inbox_takes_no_new_sender(pair: Any, house: Any) -> None:
    sender = pair[0]
    receiver = pair[1]
    inbox, invitation = receiver.open_inbox()
    assert receiver.fence(inbox) is True
    late = house.local("late", connect_timeout_s=0.5)
    with pytest.raises(kv.PeerUnreachable):
        late.agent.connect(invitation, late.region)
    assert not sender.lost


def test_incompatible_peers_are_refused_with_both_values(house: Any) -> None:
    receiver = house.remote(fingerprint={"model": "a", "page_size": "16"})
    _, invitation = receiver.open_inbox()
    stranger = house.local(fingerprint={"model": "b", "page_size": "16"})
    with pytest.raises(kv.IncompatiblePeer, match=r"model: 'b' here, 'a' at the peer"):
        stranger.agent.connect(invitation, stranger.region)
    picky = house.local("picky", fingerprint={"model": "a", "page_size": "16"}, expected_transport="rc_mlx5")
    with pytest.raises(kv.UnexpectedTransport, match="rc_mlx5"):
        picky.agent.connect(invitation, picky.region)


def test_memory_of_others_can_be_the_source(pair: Any) -> None:
    sender, receiver, inbox, _ = pair
    array = np.arange(PAGE, dtype=np.uint8)
    with pytest.raises(kv.InvalidArgument):
        sender.agent.register(0, 1)
    source = sender.agent.register(array.ctypes.data, array.nbytes)
    _, invitation = receiver.open_inbox()
    peer = sender.agent.connect(invitation, source)
    handle = peer.begin(9)
    handle.post(rows((0, 5 * PAGE, PAGE)))
    handle.finish(0, Doorbell(9, 1))
    assert sender.state(9) is WriteState.DONE
    assert receiver.read(5 * PAGE, PAGE) == array.tobytes()
    peer.close()
    assert inbox == 0


def test_new_memory_is_zero_and_its_views_outlive_it(house: Any) -> None:
    sender = house.local(num_bytes=3 * PAGE)
    assert sender.read(0, 3 * PAGE) == bytes(3 * PAGE)
    view = np.frombuffer(sender.region.buffer, dtype=np.uint8)
    sender.region.close()
    sender.region.close()
    view[:] = 1  # still mapped
    with pytest.raises(kv.Closed):
        _ = sender.region.buffer
    for bad in (0, -1):
        with pytest.raises((kv.InvalidArgument, OverflowError)):
            sender.agent.allocate(bad)


def test_a_probe_measures_both_directions(pair: Any) -> None:
    points = pair[3].probe()
    assert {(point.direction, point.num_bytes) for point in points} == {(way, size) for way in ("write", "read") for size in (64 << 10, 1 << 20)}
    assert all(point.gigabytes_per_s > 0 for point in points)


def test_an_agent_closes_in_any_order_and_then_refuses(house: Any) -> None:
    sender, receiver = house.local(), house.remote()
    _, invitation = receiver.open_inbox()
    peer = sender.agent.connect(invitation, sender.region)
    handle = peer.begin(1)
    handle.post(rows((0, 0, PAGE)))
    sender.close()
    sender.close()
    assert handle.state is WriteState.QUIESCED
    for act in (lambda: sender.agent.allocate(1), lambda: sender.agent.connect(invitation, sender.region), lambda: peer.begin(2), peer.probe):
        with pytest.raises(kv.Closed):
            act()
    peer.close()


def test_bytes_that_are_no_invitation_are_refused(house: Any) -> None:
    sender = house.local()
    inbox = sender.agent.open_inbox("x", sender.region)
    good = bytearray(inbox.invitation)
    good[len(good) // 2] ^= 1
    for bad in (b"", b"x" * 100, bytes(good), inbox.invitation[:-1], inbox.invitation + b"\0", sender.agent.identity):
        with pytest.raises(kv.InvalidArgument):
            sender.agent.connect(bad, sender.region)


def test_what_is_no_whole_number_is_refused_and_not_cut(pair: Any, house: Any) -> None:
    peer = pair[-1]
    with pytest.raises(kv.InvalidArgument, match=re.escape("room=7.9 is a float, must be a whole number")):
        peer.begin(7.9)
    agent = house.local("another").agent
    inbox = agent.open_inbox("sender", agent.allocate(PAGE))
    for room, generation in ((7.9, 1), (7, 1.0), ("7", 1)):
        with pytest.raises(kv.InvalidArgument, match="must be a whole number"):
            inbox.arm(room, generation)
    assert inbox.arm(np.int64(7), np.int64(1)) >= 0
    with pytest.raises(kv.InvalidArgument, match=re.escape("num_bytes=4096.0 is a float")):
        agent.allocate(4096.0)


def test_a_region_of_another_agent_is_refused(pair: Any, house: Any) -> None:
    sender, receiver, _, _ = pair
    agent = house.local("another").agent
    with pytest.raises(kv.InvalidArgument, match="region is a region of another agent"):
        agent.open_inbox("sender", sender.region)
    _, invitation = receiver.open_inbox()
    with pytest.raises(kv.InvalidArgument, match="source is a region of another agent"):
        agent.connect(invitation, sender.region)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "rdma"),
        ("transport", "udp"),
        ("transfer_queues", 0),
        ("instance_id", ""),
        ("max_put_bytes", 1),
        ("device", "gpu"),
        ("spin_us", -1),
        ("transfer_queues", 1.5),
        ("probe_bytes", 1e6),
    ],
)
def test_a_bad_setting_names_itself_and_its_value(field: str, value: Any) -> None:
    with pytest.raises(kv.InvalidArgument, match=re.escape(f"{field}={value!r}" if isinstance(value, str) else f"{field}={value}")):
        AgentConfig(**{"instance_id": "x", field: value})
