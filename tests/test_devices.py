"""Network devices come and go while the three services run, each on a host of its own or all on one: nobody is started again for it, health says
what cannot be served meanwhile, and no page stays behind."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from faults.cells import DEADLINE_S, ENOUGH_TOKENS, PROMPT, TESTS, Caller, FaultFleet, Log, Made, counted, fault_fleet, reach, restore, told
from faults.net import why_not
from fleet import wait_for
from grpc_health.v1 import health_pb2, health_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.long]

WIRE = "prefill-decode"
HOST = "decode"
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


class OneHost(FaultFleet):
    """All three on one host. KV pages may take its spare device and, where there is none, its loopback device."""

    def build(self) -> OneHost:
        self.net.lay_spare(HOST)
        super().build()
        return self

    def call(self, request_id: str, max_tokens: int) -> Caller:
        words = (sys.executable, str(TESTS / "faults" / "caller.py"), self.grpc, request_id, str(max_tokens), str(DEADLINE_S))
        return Caller((*words, *map(str, PROMPT)), request_id)

    def prefill_comes_back(self) -> None:
        """Prefill is killed and started again; it is served by the decode server that was there all the time."""
        decode = self.party("decode").running
        self.party("prefill").kill()
        restore(self)
        assert self.party("decode").running is decode
        assert decode.exit_text() is None

    def _command(self, service: str, *flags: str) -> tuple[str, ...]:  # type: ignore[override]
        run = [sys.executable, "-m", "baton.gateway.app"]
        if service != "gateway":
            run = ["env", f"UCX_NET_DEVICES={self.net.spare(HOST)},lo", sys.executable, str(TESTS / "faults" / "held_service.py"), service]
            run.append(str(self.hold_file))
        return self.net.command(HOST, *run, *flags, "--host", "0.0.0.0", "--advertise-host", self.net.address(HOST))


def _built(kind: type[Made], model_path: Path, run_dir: Path) -> Iterator[Made]:
    if reason := why_not():
        pytest.skip(f"hosts on this machine: {reason}")
    with fault_fleet(kind, model_path, run_dir) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    yield from _built(Devices, model_path, tmp_path_factory.mktemp("devices"))


@pytest.fixture(scope="module")
def one_host(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneHost]:
    yield from _built(OneHost, model_path, tmp_path_factory.mktemp("one-host"))


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


def test_the_device_of_an_idle_way_goes(one_host: OneHost) -> None:
    """The request is served in its first room: the way is laid anew when it is looked at, 20 s before TCP would have given it up."""
    logs = _logs(one_host)
    one_host.net.take_spare(HOST)
    try:
        assert _answered(one_host, f"idle-{secrets.token_hex(4)}", logs) == "nothing"
        assert _is_laid_anew(logs)
        one_host.assert_free(SEEN_WITHIN_S)
    finally:
        one_host.net.lay_spare(HOST)
    one_host.prefill_comes_back()


def test_the_address_of_an_idle_way_changes(one_host: OneHost) -> None:
    """Decode's inbox has the old one: a new session has a new inbox, and the request goes on in a second room."""
    logs = _logs(one_host)
    one_host.net.readdress_spare(HOST)
    try:
        assert _causes(_answered(one_host, f"moved-{secrets.token_hex(4)}", logs)) <= {"way_lost (transfer)"}
        one_host.prefill_comes_back()
    finally:
        one_host.net.readdress_spare(HOST, 220, 210)
    one_host.prefill_comes_back()


def test_a_device_is_laid_anew_with_its_address(one_host: OneHost) -> None:
    one_host.net.take_spare(HOST)
    one_host.net.lay_spare(HOST)
    restore(one_host)
    one_host.prefill_comes_back()


def test_a_write_whose_device_goes_is_told_as_that_and_the_request_goes_on(one_host: OneHost) -> None:
    logs = _logs(one_host)
    one_host.hold("transferring")
    caller = one_host.call(f"under-way-{secrets.token_hex(4)}", ENOUGH_TOKENS)
    try:
        reach(logs["gateway"], caller, "TRANSFERRING")
        one_host.net.take_spare(HOST)
        wait_for(lambda: "gateway" in counted(logs, caller.request_id), SEEN_WITHIN_S, lambda: f"the room has failed: {caller.end}")
        one_host.hold("")
        wait_for(lambda: caller.end is not None, SEEN_WITHIN_S, "an answer")
        assert caller.end == {"code": "OK"}
        assert _causes(counted(logs, caller.request_id)) == {"way_lost (transfer)"}
        one_host.assert_free(SEEN_WITHIN_S)
    finally:
        one_host.hold("")
        caller.close()
        one_host.net.lay_spare(HOST)
    one_host.prefill_comes_back()


def _logs(fleet: FaultFleet) -> dict[str, Log]:
    return {name: Log(fleet.party(name).running.log_path) for name in ("gateway", "prefill", "decode")}


def _answered(fleet: FaultFleet, request_id: str, logs: dict[str, Log]) -> str:
    """What the services counted as failed on the way to a whole answer."""
    caller = fleet.call(request_id, ENOUGH_TOKENS)
    try:
        wait_for(lambda: caller.end is not None, SEEN_WITHIN_S, "an answer")
        assert caller.end == {"code": "OK"}, caller.end
        return counted(logs, request_id)
    finally:
        caller.close()


def _is_laid_anew(logs: dict[str, Log]) -> bool:
    return any(line["event"] == "way to decode laid anew" for line in logs["prefill"].lines())


def _causes(said: str) -> set[str]:
    """Of what `counted` returns."""
    return {line.partition(": ")[2] for line in said.split("; ")} - {""}
