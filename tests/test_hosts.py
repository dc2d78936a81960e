"""Three services on three hosts: own addresses, a wire for KV pages that is long and narrow, UCX over tcp. It answers, fills the wire, and survives
a wire that is cut and a host that vanishes."""

from __future__ import annotations

import secrets
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from faults.cells import FaultFleet, Log, drive, reach, restore, told
from faults.net import why_not
from fleet import MODEL, wait_for
from hosts.slow_net import SlowNet, why_no_relay

from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).parents[1]
MEGABITS = 80
DELAY_MS = 5.0
#: 24 MB of KV pages: 2.4 s on the wire, so that its length in time does not matter.
LONG = [100 + i * 13 % 4000 for i in range(512)]
#: gRPC's keepalive finds within 15 s that nobody is there; a busy machine takes a little longer.
TOLD_WITHIN_S = 30.0


class Hosts(FaultFleet):
    def build(self) -> Hosts:
        """All pages of a prompt leave when it is computed, so that nothing but the wire decides how long they take."""
        common = ("--transport", "tcp", "--stall-limit-s", "300", "--no-prefix-cache")  # the same prompt is moved whole, each time
        self.prefill("--no-layerwise", *common)
        self.decode("--digest", "all", *common)
        self.start("--stall-limit-s", "300", "--retries", "0")
        return self


@pytest.fixture(scope="module")
def hosts(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = why_not() or why_no_relay()
    if reason:
        pytest.skip(f"several hosts on this machine: {reason}")
    with SlowNet(MEGABITS, DELAY_MS) as net:
        fleet = Hosts(net, model_path, tmp_path_factory.mktemp("hosts"))
        try:
            yield fleet.build()
        except BaseException:
            for worker in fleet._all():
                worker.running.reap()
            raise
        fleet.close()


def transfer_of(hosts: Hosts, prompt: list[int]) -> pb.TransferReport:
    sampling = pb.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=prompt), sampling=sampling, report=True)
    with grpc.insecure_channel(hosts.grpc) as channel:
        return list(InferenceStub(channel).Generate(request, timeout=120))[-1].report.transfer


def test_a_client_on_a_host_of_its_own_is_answered(hosts: Hosts) -> None:
    smoke = (sys.executable, str(ROOT / "deploy" / "scripts" / "smoke.py"), f"http://{hosts.http}", "--wait-s", "30")
    done = subprocess.run(hosts.net.command("client", *smoke), capture_output=True, text=True, timeout=120, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_pages_fill_the_wire(hosts: Hosts) -> None:
    net = hosts.net
    assert isinstance(net, SlowNet)
    ratios, speeds = [], []
    transfer_of(hosts, LONG[:64])
    for _ in range(3):
        moved = transfer_of(hosts, LONG)
        assert (moved.digest_checked, "tcp" in moved.transport) == (True, True), moved
        plain = net.plain_tcp_bytes_s(moved.bytes)
        speeds.append(moved.bytes / (moved.duration_ms / 1e3))
        ratios.append(speeds[-1] / plain)
        print(f"{moved.bytes / 1e6:.1f} MB of KV pages: {speeds[-1] / 1e6:.2f} MB/s, plain TCP {plain / 1e6:.2f} MB/s: {ratios[-1]:.3f}")
    allowed = net.allowed_bytes_s
    print(f"the wire lets {allowed / 1e6:.2f} MB/s through ({MEGABITS} Mbit/s, {DELAY_MS:g} ms each way): {max(speeds) / allowed:.3f} of that")
    assert max(speeds) <= 1.05 * allowed, "faster than the wire: pages went another way"
    assert max(speeds) >= 0.9 * allowed, "slower than the wire"
    assert statistics.median(ratios) >= 0.9, "slower than plain TCP"


def test_a_cut_wire_ends_its_rooms_and_no_more(hosts: Hosts) -> None:
    outcome = drive(hosts, "cut prefill-decode", "TRANSFERRING")
    restore(hosts)
    print(outcome)
    assert outcome.client.startswith("UNAVAILABLE "), outcome
    assert "from its own gRPC" not in outcome.client, outcome


def test_a_host_that_vanishes(hosts: Hosts) -> None:
    """Power off: no connection is closed, nothing answers. The other servers tell the client and get their pages back; a new host is used."""
    log = Log(hosts.party("gateway").running.log_path)
    hosts.hold("waiting")
    caller = hosts.call(f"vanish-{secrets.token_hex(4)}", 4)
    wires = ("gateway-decode", "prefill-decode")
    try:
        reach(log, caller, "WAITING")
        for wire in wires:
            hosts.net.cut(wire)
        hosts.party("decode").kill()
        hosts.hold("")
        took_s = wait_for(lambda: caller.end is not None, TOLD_WITHIN_S, "the client is told that decode's host is gone")
        assert caller.end is not None
        print(f"told after {took_s:.1f} s: {told(caller.end)}")
        assert caller.end["cause"], caller.end
        assert caller.end["origin"] in ("decode", "transfer"), caller.end
        prefill = hosts.party("prefill")
        wait_for(lambda: (load := prefill.info().load).free_pages == load.total_pages and not load.rooms, TOLD_WITHIN_S, "prefill's pages are back")
    finally:
        hosts.hold("")
        caller.close()
        for wire in wires:
            hosts.net.heal(wire)
    restore(hosts)
