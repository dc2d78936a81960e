"""Network devices come and go while the three services run, each on a host of its own: nobody is started again for it, health says what cannot be
served meanwhile, and no page stays behind."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from faults.cells import FaultFleet, Log, reach, restore, told
from faults.net import Net, why_not
from fleet import wait_for
from grpc_health.v1 import health_pb2, health_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.long]

WIRE = "prefill-decode"
SERVERS = ("prefill", "decode")
#: gRPC's keepalive finds a wire that is gone within 15 s; a busy machine takes longer for everything.
SEEN_WITHIN_S = 60.0


class Devices(FaultFleet):
    """KV pages may take the wire and a spare device that leads nowhere."""

    def build(self) -> Devices:
        for server in SERVERS:
            self.net.lay_spare(server)
        super().build()
        return self

    def _devices(self, service: str) -> str:
        return f"{super()._devices(service)},{self.net.spare(service)}"

    def health(self) -> str:
        """Decode's, over a wire that nobody takes away."""
        with grpc.insecure_channel(self.party("decode").address()) as channel:
            found = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(found.status))


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    if reason := why_not():
        pytest.skip(f"hosts on this machine: {reason}")
    with Net() as net:
        fleet = Devices(net, model_path, tmp_path_factory.mktemp("devices"))
        try:
            yield fleet.build()
        except BaseException:
            for worker in fleet._all():
                worker.running.reap()
            raise
        fleet.close()


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_that_comes_back_is_served_by_one_that_lost_a_device(fleet: Devices, server: str) -> None:
    """The device has nothing to do with them, but was there when both started."""
    other = SERVERS[1 - SERVERS.index(server)]
    stays = fleet.party(other).running.pid
    fleet.net.take_spare(other)
    try:
        fleet.party(server).kill()
        restore(fleet)
        assert fleet.party(other).running.pid == stays
        assert fleet.party(other).running.exit_text() is None
    finally:
        fleet.net.lay_spare(other)


def test_a_device_that_comes_disturbs_nobody(fleet: Devices) -> None:
    for server in SERVERS:
        fleet.net.take_spare(server)
    restore(fleet)
    for server in SERVERS:
        fleet.net.lay_spare(server)
    restore(fleet)


def test_the_device_of_a_transfer_goes(fleet: Devices) -> None:
    """The client is told or answered, everything is free, and the wire that is laid anew is used by the same servers."""
    pids = [fleet.party(server).running.pid for server in SERVERS]
    log = Log(fleet.party("gateway").running.log_path)
    fleet.hold("transferring")
    caller = fleet.call(f"gone-{secrets.token_hex(4)}", 4)
    try:
        reach(log, caller, "TRANSFERRING")
        fleet.net.take_away(WIRE)
        fleet.hold("")
        took_s = wait_for(lambda: caller.end is not None, SEEN_WITHIN_S, "the client is told")
        assert caller.end is not None
        print(f"after {took_s:.1f} s: {told(caller.end)}")
        assert caller.end["code"] == "OK" or caller.end["cause"], caller.end
        fleet.assert_free(SEEN_WITHIN_S)
    finally:
        fleet.hold("")
        caller.close()
        fleet.net.lay_again(WIRE)
    restore(fleet)
    assert [fleet.party(server).running.pid for server in SERVERS] == pids


def test_health_says_that_no_inbox_can_be_opened_and_recovers(fleet: Devices) -> None:
    """UCX finds none of decode's devices any more."""
    assert fleet.health() == "SERVING"
    fleet.net.take_spare("decode")
    fleet.net.take_away(WIRE)
    try:
        wait_for(lambda: fleet.health() == "NOT_SERVING", SEEN_WITHIN_S, fleet.health)
        assert not fleet.ready()
    finally:
        fleet.net.lay_again(WIRE)
        fleet.net.lay_spare("decode")
    wait_for(lambda: fleet.health() == "SERVING", SEEN_WITHIN_S, fleet.health)
    restore(fleet)
