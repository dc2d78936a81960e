"""Network devices come and go while agents live: what is opened and connected then uses those that are there, and nothing of the others stays."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.kvtransfer import AgentConfig, Doorbell, WriteState, open_agent
from baton.kvtransfer.ucx import devices, footholds

PAGE = 4096
NUM_FLAPS = 20
#: TCP gives up after 20 s (options.py); a busy machine takes longer.
FOUND_WITHIN_S = 90.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + FOUND_WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def write_over(sender: Any, receiver: Any, peer: int, inbox: int, room: int) -> None:
    content = np.random.default_rng(room).bytes(PAGE)
    sender.write(0, content)
    slot = receiver.arm(inbox, room, 1)
    sender.begin(peer, room)
    sender.post(room, [(0, PAGE, PAGE)])
    sender.finish(room, slot, Doorbell(room, 1))
    assert sender.state(room) is WriteState.DONE
    assert receiver.read(PAGE, PAGE) == content


def write(sender: Any, receiver: Any, room: int) -> int:
    """A room over a new peer and a new inbox, from one page into another; the inbox's number."""
    inbox, invitation = receiver.open_inbox()
    peer = sender.connect(invitation)
    write_over(sender, receiver, peer, inbox, room)
    assert receiver.doorbells(room)[-1].room == room
    sender.close_peer(peer)
    return int(inbox)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_agents_outlive_the_device_that_was_there_when_they_started(hosts: Any, transport: str) -> None:
    hosts.wire.lay()
    receiver, sender = hosts.on("receiver", transport=transport), hosts.on("sender")
    write(sender, receiver, 1)
    hosts.wire.take_away()
    receiver.open_inbox()
    hosts.wire.lay()
    write(sender, receiver, 2)


@pytest.mark.parametrize("network", [212, 213], ids=["same address", "other address"])
@pytest.mark.parametrize("stays", ["receiver", "sender"])
def test_the_device_of_both_is_laid_anew_and_one_of_them_is_a_new_process(hosts: Any, stays: str, network: int) -> None:
    """On one host: the kernel sends to the host's own addresses through its loopback device, whichever device has them."""
    hosts.wire.lay_beside()
    on = {name: hosts.on("receiver", ucx_options={"NET_DEVICES": hosts.wire.beside("receiver")}) for name in ("receiver", "sender")}
    write(on["sender"], on["receiver"], 1)
    hosts.wire.take_beside_away()
    hosts.wire.lay_beside(network)
    came = "sender" if stays == "receiver" else "receiver"
    on[came].end()
    on[came] = hosts.on("receiver")
    write(on["sender"], on["receiver"], 2)


def test_the_address_of_both_changes(hosts: Any) -> None:
    hosts.wire.lay_beside()
    receiver, sender = hosts.on("receiver"), hosts.on("receiver")
    write(sender, receiver, 1)
    hosts.wire.readdress_beside(212, 213)
    write(sender, receiver, 2)
    write(hosts.on("receiver"), receiver, 3)


def test_a_peer_that_has_lost_its_device_says_so_at_once_and_another_goes_another_way(hosts: Any) -> None:
    """Idle, so that TCP would find out with the next write only, 20 s after it began. The receiver needs no new inbox."""
    hosts.wire.lay_beside()
    receiver, sender = hosts.on("receiver"), hosts.on("receiver")
    inbox, invitation = receiver.open_inbox()
    peer = sender.connect(invitation)
    write_over(sender, receiver, peer, inbox, 1)
    assert sender.check_peer(peer)
    assert receiver.missing(inbox) == ""
    hosts.wire.take_beside_away()
    gone = rf"PeerLost: receiver-.*: address 10\.212\.1\.1 of network device {hosts.wire.beside('receiver')}, which it went through, is gone"
    with pytest.raises(Exception, match=gone):
        sender.begin(peer, 2)
    assert hosts.wire.beside("receiver") in receiver.missing(inbox)
    eventually(lambda: len(sender.lost_peers()) == 1, "on_peer_lost")
    write_over(sender, receiver, sender.connect(invitation), inbox, 3)
    assert receiver.missing(inbox) == "", "one of its connections stands"


def test_a_write_under_way_fails_as_soon_as_somebody_looks(hosts: Any) -> None:
    hosts.wire.lay_beside()
    receiver, sender = hosts.on("receiver"), hosts.on("receiver")
    inbox, invitation = receiver.open_inbox()
    peer = sender.connect(invitation)
    sender.begin(peer, 1)
    sender.post(1, [(0, PAGE, PAGE)])
    hosts.wire.take_beside_away()
    assert not sender.check_peer(peer)
    assert sender.state(1) is WriteState.FAILED
    assert receiver.fence(inbox)


def test_a_device_that_others_go_through_is_not_missed(hosts: Any) -> None:
    hosts.wire.lay_beside()
    hosts.wire.lay()
    receiver, sender = hosts.on("receiver"), hosts.on("sender")
    inbox, invitation = receiver.open_inbox()
    peer = sender.connect(invitation)
    hosts.wire.take_beside_away()
    assert sender.check_peer(peer)
    write_over(sender, receiver, peer, inbox, 1)
    assert receiver.missing(inbox) == ""
    hosts.wire.take_away()
    assert not sender.check_peer(peer)
    assert "10.211.1.1 of network device" in receiver.missing(inbox)


NO_ROUTE = "int ucs_netlink_is_best_route(int device, const void *remote) { return 0; }"


def test_a_sender_that_nobody_can_answer_is_refused_and_ends_no_process(hosts: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """UCX 1.22 dies of the sender's own questions where it finds no route back: ours asks none."""
    (tmp_path / "no_route.c").write_text(NO_ROUTE, encoding="ascii")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "no_route.so", "no_route.c"], cwd=tmp_path, env=environment, check=True)
    preloaded = " ".join(filter(None, (os.environ.get("LD_PRELOAD"), str(tmp_path / "no_route.so"))))  # a sanitizer must come first
    hosts.wire.lay()
    receiver, sender = hosts.on("receiver", prefix=("env", f"LD_PRELOAD={preloaded}")), hosts.on("sender", connect_timeout_s=2.0)
    for _ in range(2):
        _, invitation = receiver.open_inbox()
        with pytest.raises(Exception, match=r"PeerUnreachable: .* no answer in time: it hangs, or has no way back to this host"):
            sender.connect(invitation)
    assert receiver.process.poll() is None
    assert "a sender that no network device here leads back to has connected" in capfd.readouterr().err
    write(sender, hosts.on("receiver"), 1)


def test_footholds_are_read_from_ucx_description(tmp_path: Path) -> None:
    """After sysfs's documentation: no InfiniBand device is at hand."""
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state"
    port.parent.mkdir(parents=True)
    port.write_text("4: ACTIVE\n", encoding="ascii")
    info = (
        "#                 lane[0]:  4:rc_mlx5/mlx5_0:1.0 md[3]     -> md[3]/ib/sysdev[255] rma_bw#0 am am_bw#0 wireup\n"
        "#                 lane[1]:  1:tcp/lo.0 md[1]       -> md[1]/tcp/sysdev[255] am\n"
        "#                 lane[2]:  9:cma/memory.0 md[4]   -> md[4]/cma/sysdev[255] rma_bw#1\n"
    )
    found = footholds.of(info, tmp_path)
    assert [(one.device, one.address) for one in found] == [("mlx5_0:1", ""), ("lo", "127.0.0.1")]
    assert all(one.is_there(tmp_path) for one in found)
    port.write_text("1: DOWN\n", encoding="ascii")
    assert [one.is_there(tmp_path) for one in found] == [False, True]
    assert footholds.missing([footholds.Foothold("eth7", "192.0.2.1"), found[1]]) == "address 192.0.2.1 of network device eth7"


def test_a_device_that_goes_right_after_somebody_looked(hosts: Any) -> None:
    """UCX's refusal alone makes a new context."""
    hosts.wire.lay_beside()
    hosts.wire.lay()
    receiver, sender = hosts.on("receiver"), hosts.on("sender")
    write(sender, receiver, 1)
    for agent in (receiver, sender):
        agent.overlook_devices()
    hosts.wire.take_beside_away()
    write(sender, receiver, 2)


def test_a_device_that_comes_later_is_used(hosts: Any) -> None:
    receiver, sender = hosts.on("receiver"), hosts.on("sender", connect_timeout_s=2.0)
    _, invitation = receiver.open_inbox()
    with pytest.raises(Exception, match=r"PeerUnreachable: receiver-.* over network"):
        sender.connect(invitation)
    hosts.wire.lay()
    write(sender, receiver, 1)


def test_devices_that_have_nothing_to_do_with_a_transfer_do_not_disturb_it(hosts: Any) -> None:
    hosts.wire.lay()
    receiver, sender = hosts.on("receiver"), hosts.on("sender")
    inbox, invitation = receiver.open_inbox()
    peer = sender.connect(invitation)
    for room in range(1, 6):
        hosts.wire.lay_beside() if room % 2 else hosts.wire.take_beside_away()
        slot = receiver.arm(inbox, room, 1)
        sender.begin(peer, room)
        sender.post(room, [(0, PAGE, PAGE)])
        sender.finish(room, slot, Doorbell(room, 1))
        assert sender.state(room) is WriteState.DONE
        receiver.disarm(inbox, slot)


@pytest.mark.long
def test_a_write_whose_device_goes_ends_and_the_next_one_goes_another_way(hosts: Any) -> None:
    hosts.wire.lay()
    receiver, sender = hosts.on("receiver", num_bytes=8 << 20), hosts.on("sender", num_bytes=8 << 20)
    inbox, invitation = receiver.open_inbox()
    sender.flood(sender.connect(invitation), 1, 8 << 20, 100_000)
    eventually(lambda: receiver.digest([(0, PAGE)]) is not None and sender.num_bytes(1) > 0, "it writes")
    hosts.wire.take_away()
    hosts.wire.lay()
    write(sender, receiver, 2)
    eventually(lambda: sender.state(1, 0.0) is WriteState.FAILED, "the write over the device that went has ended")
    assert receiver.fence(inbox), "nothing of it lands any more"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_devices_that_come_and_go_leave_nothing(hosts: Any, transport: str) -> None:
    receiver, sender = hosts.on("receiver", transport=transport), hosts.on("sender")

    def flap(room: int) -> None:
        hosts.wire.lay()
        inbox = write(sender, receiver, room)
        hosts.wire.take_away()
        assert receiver.fence(inbox)
        receiver.close_inbox(inbox)

    for room in range(1, 4):
        flap(room)
    before = [agent.belongings() for agent in (receiver, sender)]
    for room in range(4, 4 + NUM_FLAPS):
        flap(room)
    for agent, (descriptors, threads) in zip((receiver, sender), before, strict=True):
        assert agent.num_contexts() <= 2, "one for shared memory, one for the devices of the last write"
        eventually(lambda: agent.belongings() <= (descriptors + 3, threads), f"{agent.belongings()} descriptors and threads, were {before}")  # noqa: B023 # called in this turn


def test_a_host_without_any_device_serves_senders_of_its_own(hosts: Any) -> None:
    hosts.wire.silence("receiver")
    receiver, neighbour = (hosts.on("receiver", transport="auto") for _ in range(2))
    write(neighbour, receiver, 1)
    _, invitation = receiver.open_inbox()
    with pytest.raises(Exception, match=r"PeerUnreachable: receiver-.* had no network device when it opened this inbox"):
        hosts.on("sender").connect(invitation)
    hosts.wire.lay()
    write(hosts.on("sender"), receiver, 2)


def test_an_inbox_that_is_closed_late_leaves_the_next_one_its_descriptor(tcp: Any) -> None:
    """UCX gives the next worker the number of a descriptor that the last one closed."""
    receiver, sender = tcp.local("receiver"), tcp.local("sender")
    fenced = receiver.agent.open_inbox("sender", receiver.region)
    assert fenced.fence(None)
    inbox = receiver.agent.open_inbox("sender", receiver.region)
    fenced.close()
    sender.agent.connect(inbox.invitation, sender.region).close()


def test_a_choice_of_devices_leaves_the_others_out(tmp_path: Path) -> None:
    everything = devices.find()
    assert any(name.startswith("lo#") for name in everything), everything
    assert all(name.startswith("lo#") for name in devices.find("lo")), devices.find("lo")
    assert devices.find("all") == everything
    assert devices.find("^lo") == everything, "a negation is UCX's to understand"
    assert not devices.find("mlx5_0:1", tmp_path)


def test_ports_of_infiniband_count_while_they_are_active(tmp_path: Path) -> None:
    """After sysfs's documentation: no such device is at hand."""
    states = [tmp_path / "sys/class/infiniband/mlx5_0/ports" / port / "state" for port in "12"]
    for state, text in zip(states, ("4: ACTIVE\n", "1: DOWN\n"), strict=True):
        state.parent.mkdir(parents=True)
        state.write_text(text, encoding="ascii")
    found = {name.partition("#")[0] for name in devices.find("mlx5_0:1,mlx5_0:2", tmp_path)}
    assert found == {"mlx5_0:1"}


@pytest.mark.parametrize(("transports", "shares", "goes"), [("sm", True, False), ("sysv,tcp", True, True), ("all", True, True)])
def test_a_choice_of_transports_is_parted_between_host_and_network(transports: str, shares: bool, goes: bool) -> None:
    with open_agent(AgentConfig("receiver", ucx_options={"TLS": transports}, probe_bytes=0)) as agent:
        region = agent.allocate(PAGE)
        peer = agent.connect(agent.open_inbox("sender", region).invitation, region)
        assert (peer.transport in ("sysv", "posix")) is shares
        deadline = time.monotonic() + 10
        while goes and "baton-kv-inbox" not in _threads() and time.monotonic() < deadline:  # it names itself when it first runs
            time.sleep(0.01)
        assert ("baton-kv-inbox" in _threads()) is goes, "a thread that progresses what comes over networks"


def _threads() -> list[str]:
    return [Path(f"/proc/self/task/{task}/comm").read_text(encoding="ascii").strip() for task in os.listdir("/proc/self/task")]
