"""Processes that die, stop and come back, over real UCX. Guard bytes tell who wrote where."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import numpy as np
import pytest

import baton.kvtransfer as kv
from baton.kvtransfer import Doorbell, WriteState

PAGE = 4096
BIG = 64 << 20


def wait_until(condition: Any, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def send(sender: Any, peer: Any, room: int, slot: int) -> WriteState:
    handle = peer.begin(room)
    handle.post(np.array([[0, 0, PAGE]]))
    handle.finish(slot, Doorbell(room, 1))
    return sender.state(room)


def test_a_killed_receiver_fails_its_rooms_and_its_successor_is_reached(shared_memory_is_clean: None, ucx: Any) -> None:
    sender = ucx.local(num_bytes=BIG)
    receiver = ucx.remote(num_bytes=BIG)
    _, invitation = receiver.open_inbox()
    peer = sender.agent.connect(invitation, sender.region)
    handle = peer.begin(1)
    handle.post(np.repeat([[0, 0, BIG]], 200, axis=0))
    assert wait_until(lambda: handle.num_bytes > BIG)
    killed = time.monotonic()
    receiver.kill()
    assert sender.state(1) is WriteState.FAILED
    assert time.monotonic() - killed < 5
    assert isinstance(handle.error, kv.PeerLost)
    assert wait_until(lambda: sender.lost == [peer.instance_id])
    assert peer.is_lost
    with pytest.raises(kv.PeerLost):
        peer.begin(2)
    handle.post(np.array([[0, 0, PAGE]]))  # told through the state, not raised
    peer.close()
    with pytest.raises(kv.PeerUnreachable):
        sender.agent.connect(invitation, sender.region)
    successor = ucx.remote(num_bytes=BIG)
    inbox, invitation = successor.open_inbox()
    peer = sender.agent.connect(invitation, sender.region)
    assert send(sender, peer, 3, successor.arm(inbox, 3, 1)) is WriteState.DONE
    assert successor.doorbells(1)[0].room == 3


def test_a_killed_sender_is_fenced_and_its_successor_gets_in(shared_memory_is_clean: None, ucx: Any) -> None:
    receiver = ucx.local("receiver", num_bytes=BIG)
    sender = ucx.remote("sender", num_bytes=BIG)
    inbox, invitation = receiver.open_inbox()
    identity = sender.identity()
    peer = sender.connect(invitation)
    receiver.arm(inbox, 1, 1)
    sender.flood(peer, 1, BIG, 1000)
    assert wait_until(lambda: sender.num_bytes(1) > BIG)
    if ucx.is_shared:
        assert receiver.fence(inbox, identity) is False  # alive, and it can write
        assert receiver.fence(inbox, None) is False
    sender.kill()
    assert receiver.fence(inbox, identity) is True
    receiver.write(0, bytes(BIG))
    time.sleep(0.05)
    assert receiver.read(0, BIG) == bytes(BIG)
    assert receiver.doorbells(1, 0) == []
    sender = ucx.remote("sender", num_bytes=BIG)
    inbox, invitation = receiver.open_inbox()
    peer = sender.connect(invitation)
    sender.begin(peer, 2)
    sender.post(2, [(0, 0, PAGE)])
    sender.finish(2, receiver.arm(inbox, 2, 1), Doorbell(2, 1))
    assert receiver.doorbells(1)[0].room == 2


def test_a_suspended_sender_is_no_proof_and_its_late_write_lands_in_quarantine(shm: Any) -> None:
    """F1: the sender wakes up after its pages were revoked and writes on; they were not freed."""
    receiver = shm.local("receiver", num_bytes=BIG)
    sender = shm.remote("sender", num_bytes=BIG)
    inbox, invitation = receiver.open_inbox()
    identity, peer = sender.identity(), sender.connect(invitation)
    sender.write(0, b"\x11" * PAGE)
    receiver.arm(inbox, 1, 1)
    leases = kv.LeaseTable()
    leases.reserve(1, "sender", 1)
    leases.publish(1)
    sender.signal(signal.SIGSTOP)
    assert leases.abort(1) is None
    assert leases.peer_lost("sender")[0].state is kv.LeaseState.QUARANTINED
    for _ in range(5):
        assert receiver.fence(inbox, identity) is False
        time.sleep(0.02)
    sender.signal(signal.SIGCONT)
    sender.begin(peer, 1)
    sender.post(1, [(0, 0, PAGE)])
    sender.cancel(1)
    assert sender.state(1) is WriteState.QUIESCED
    lease = leases.quiesced(1, 1)
    assert lease is not None
    assert lease.state is kv.LeaseState.FREE
    sender.close_peer(peer)
    assert receiver.fence(inbox, None) is True


def test_tcp_is_fenced_while_the_sender_lives(tcp: Any) -> None:
    receiver = tcp.local("receiver", num_bytes=BIG)
    sender = tcp.remote("sender", num_bytes=BIG)
    inbox, invitation = receiver.open_inbox()
    other_inbox, other_invitation = receiver.open_inbox("other")
    peer, other = sender.connect(invitation), sender.connect(other_invitation)
    sender.flood(peer, 1, BIG, 1000)
    assert wait_until(lambda: sender.num_bytes(1) > BIG)
    assert receiver.fence(inbox, None) is True
    receiver.write(0, bytes(BIG))
    assert sender.state(1) is WriteState.FAILED
    assert receiver.read(0, BIG) == bytes(BIG)
    sender.begin(other, 2)
    sender.finish(2, receiver.arm(other_inbox, 2, 1), Doorbell(2, 1))  # the other inbox of the same sender is not touched
    assert receiver.doorbells(1)[0].room == 2
    receiver.fence(other_inbox)


def test_a_broken_connection_is_replaced_over_the_same_invitation(tcp: Any) -> None:
    """F22: the link dies, both processes live."""
    sender = tcp.local(num_bytes=PAGE)
    receiver = tcp.remote(num_bytes=PAGE)
    inbox, invitation = receiver.open_inbox()
    for room in range(1, 4):
        before = tcp_sockets()
        peer = sender.agent.connect(invitation, sender.region)
        assert send(sender, peer, room, receiver.arm(inbox, room, 1)) is WriteState.DONE
        for number in tcp_sockets() - before:
            with socket.socket(fileno=os.dup(number)) as end:
                end.shutdown(socket.SHUT_RDWR)
        assert wait_until(lambda room=room: len(sender.lost) == room)
        with pytest.raises(kv.PeerLost, match="the endpoint broke"):
            peer.begin(100 + room)
        peer.close()
    assert [bell.room for bell in receiver.doorbells(3)] == [1, 2, 3]


def tcp_sockets() -> set[int]:
    """Descriptors of this process that are connected over tcp."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family == socket.AF_INET and end.getpeername():
                    found.add(int(name))
        except OSError:
            continue
    return found


def test_an_address_without_a_listener_is_unreachable_in_time(ucx: Any) -> None:
    receiver = ucx.remote()
    _, invitation = receiver.open_inbox()
    receiver.kill()
    sender = ucx.local(connect_timeout_s=2.0)
    start = time.monotonic()
    with pytest.raises(kv.PeerUnreachable, match=r"receiver-"):
        sender.agent.connect(invitation, sender.region)
    assert time.monotonic() - start < 5


def test_a_stopped_receiver_delays_connecting_no_longer_than_allowed(tcp: Any) -> None:
    receiver = tcp.remote()
    _, invitation = receiver.open_inbox()
    receiver.signal(signal.SIGSTOP)
    sender = tcp.local(connect_timeout_s=1.0)
    start = time.monotonic()
    with pytest.raises(kv.PeerUnreachable, match="connect_timeout_s"):
        sender.agent.connect(invitation, sender.region)
    assert time.monotonic() - start < 5


def test_closing_towards_a_stopped_receiver_ends(tcp: Any) -> None:
    sender, receiver = tcp.local(num_bytes=BIG), tcp.remote(num_bytes=BIG)
    _, invitation = receiver.open_inbox()
    peer = sender.agent.connect(invitation, sender.region)
    receiver.signal(signal.SIGSTOP)
    handle = peer.begin(1)
    handle.post(np.repeat([[0, 0, BIG]], 4, axis=0))
    time.sleep(0.1)
    start = time.monotonic()
    peer.close()
    assert time.monotonic() - start < 5
    assert sender.state(1) is WriteState.FAILED  # not flushed: no proof


def test_killed_processes_leave_no_shared_memory(shared_memory_is_clean: None, shm: Any) -> None:
    sender, receiver = shm.remote("sender", num_bytes=BIG), shm.remote("receiver", num_bytes=BIG)
    _, invitation = receiver.open_inbox()
    sender.connect(invitation)
    sender.kill()
    receiver.kill()
