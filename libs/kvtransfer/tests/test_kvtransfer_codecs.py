"""What travels between processes: exact, checked, and safe on hostile bytes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from baton.kvtransfer import Doorbell, InboxStats, IncompatiblePeer, InvalidArgument
from baton.kvtransfer import doorbell as records
from baton.kvtransfer.envelope import seal, unseal
from baton.kvtransfer.identity import Identity, is_gone
from baton.kvtransfer.invitation import Invitation, Way, Window, require_same

U64 = st.integers(0, 2**64 - 1)
doorbells = st.builds(
    Doorbell,
    room=st.integers(1, 2**64 - 1),
    generation=st.integers(1, 2**32 - 1),
    num_tokens=st.integers(0, 2**32 - 1),
    first_token=st.integers(-(2**31), 2**31 - 1),
    status=st.integers(0, 2**16 - 1),
    digest=U64,
    has_digest=st.booleans(),
    last_layer_ns=U64,
)
identities = st.builds(
    Identity,
    instance_id=st.text(min_size=1, max_size=20),
    boot_id=st.text(max_size=40),
    pid_namespace=U64,
    ipc_namespace=U64,
    pid=U64,
    start_ticks=U64,
)
windows = st.builds(Window, address=st.integers(0, 2**63), num_bytes=st.integers(0, 2**62), key=st.binary(max_size=40))
invitations = st.builds(
    Invitation,
    backend=st.text(max_size=8),
    transport=st.text(max_size=8),
    sender_id=st.text(max_size=20),
    identity=identities,
    nonce=U64,
    num_doorbells=st.integers(0, 2**32 - 1),
    worker=st.binary(max_size=100),
    pool=windows,
    table=windows,
    bell=windows,
    scratch=windows,
    network=st.none() | st.builds(Way, *[st.binary(max_size=40)] * 5),
    device=st.binary(max_size=80),
    device_scratch=st.binary(max_size=80),
    fingerprint=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
)


@given(doorbells, U64)
def test_a_doorbell_comes_back_as_it_went(doorbell: Doorbell, nonce: int) -> None:
    record = records.encode(doorbell, nonce)
    assert len(record) == 64
    assert records.decode(record, nonce) == doorbell
    assert records.decode(record, nonce ^ 1) is None


@given(doorbells, doorbells, st.integers(1, 63))
def test_a_torn_doorbell_is_none(old: Doorbell, new: Doorbell, cut: int) -> None:
    before, after = records.encode(old, 1), records.encode(new, 1)
    torn = after[:cut] + before[cut:]
    assert torn in (before, after) or records.decode(torn, 1) is None


@given(st.binary(min_size=64, max_size=64))
def test_random_bytes_are_no_doorbell(data: bytes) -> None:
    assert records.decode(data, 1) is None


def test_zeroed_memory_is_no_doorbell() -> None:
    assert records.decode(bytes(64), 0) is None


@pytest.mark.parametrize("field", ["room", "generation", "num_tokens", "status", "digest", "last_layer_ns", "first_token"])
def test_a_doorbell_field_out_of_range_names_itself(field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{field}={2**65}"):
        Doorbell(**{"room": 1, "generation": 1, field: 2**65})


@given(identities)
def test_an_identity_comes_back_as_it_went(identity: Identity) -> None:
    assert Identity.decode(identity.encode()) == identity


@given(invitations)
def test_an_invitation_comes_back_as_it_went(invitation: Invitation) -> None:
    assert Invitation.decode(invitation.encode()) == invitation


@given(invitations, st.data())
@settings(max_examples=300)
def test_damaged_invitations_are_refused(invitation: Invitation, data: st.DataObject) -> None:
    good = invitation.encode()
    position = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[position] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(flipped), good[:position], good + bytes(1 + position)):
        with pytest.raises(InvalidArgument):
            Invitation.decode(bad)


@given(st.dictionaries(st.integers(0, 40), st.binary(max_size=60), max_size=14), st.sampled_from([Invitation, Identity]))
@settings(max_examples=300)
def test_well_sealed_nonsense_is_refused(fields: dict[int, bytes], kind: type[Invitation | Identity]) -> None:
    magic, version = (b"BKIV", 2) if kind is Invitation else (b"BKID", 1)
    with pytest.raises(InvalidArgument):
        kind.decode(seal(magic, version, fields))


def test_another_version_is_incompatible_and_named() -> None:
    with pytest.raises(IncompatiblePeer, match="version 7, this side speaks version 1"):
        unseal("invitation", b"BKIV", 1, seal(b"BKIV", 7, {}))


def test_every_difference_of_two_fingerprints_is_named() -> None:
    require_same({"a": "1"}, {"a": "1"})
    with pytest.raises(IncompatiblePeer, match=r"a: '1' here, '2' at the peer; b: None here, 'x' at the peer"):
        require_same({"a": "1", "c": "3"}, {"a": "2", "b": "x", "c": "3"})


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def test_a_process_is_gone_when_its_last_thread_is_and_not_before() -> None:
    here = Identity.of_this_process("here")
    assert not is_gone(here, here)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        start = int(stat_of(child.pid)[19])
        there = Identity("there", here.boot_id, here.pid_namespace, here.ipc_namespace, child.pid, start)
        assert not is_gone(there, here)
        reused = Identity("there", here.boot_id, here.pid_namespace, here.ipc_namespace, child.pid, start + 1)
        assert is_gone(reused, here)
        elsewhere = Identity("there", "another host", here.pid_namespace, here.ipc_namespace, child.pid, start + 1)
        assert not is_gone(elsewhere, here)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(there, here)  # a zombie: ended, not waited for
    assert is_gone(there, here)


def test_a_process_whose_main_thread_ended_is_not_gone() -> None:
    code = (
        "import ctypes, threading, sys, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('up', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    here = Identity.of_this_process("here")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        start = int(stat_of(child.pid)[19])
        there = Identity("there", here.boot_id, here.pid_namespace, here.ipc_namespace, child.pid, start)
        deadline = threading.Event()
        while stat_of(child.pid)[0] != "Z":
            deadline.wait(0.01)
        assert not is_gone(there, here)  # looks like a zombie, but a thread lives
        child.kill()
        child.wait()
        assert is_gone(there, here)


def test_the_native_core_reads_the_same_records(shm: Any) -> None:
    """Written straight into the table, without a word to the receiver: its backstop finds them."""
    receiver = shm.local("receiver")
    inbox = receiver.agent.open_inbox("sender", receiver.region, 4)
    nonce = Invitation.decode(inbox.invitation).nonce
    slots = [inbox.arm(room, 3) for room in (1, 2, 3)]
    time.sleep(0.05)  # arming wakes the receiver; it has gone back to sleep

    def store(slot: int, record: bytes) -> None:
        ctypes.memmove(inbox.native.table_address + 64 * (1 + slot), record, len(record))

    doorbell = Doorbell(1, 3, num_tokens=9, first_token=-1, status=5, digest=2**64 - 1, has_digest=True, last_layer_ns=12)
    store(slots[0], records.encode(doorbell, nonce))
    store(slots[1], records.encode(Doorbell(2, 3), nonce + 1))  # of another inbox
    store(slots[2], b"\x01" * 64)  # no record at all
    assert receiver.doorbells(1) == [doorbell]
    deadline = time.monotonic() + 5
    while inbox.stats.num_invalid == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert inbox.stats == InboxStats(num_rung=1, num_stale=1, num_invalid=1, num_found_by_backstop=1)
