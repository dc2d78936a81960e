"""Two gateways, a real etcd and real servers, all as processes: servers come and go, etcd dies and comes back, and every answer is the same."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from fleet import MODEL, Fleet, Worker, free_port, wait_for

from baton.cli.services import ServiceSpec
from baton.servicekit import KeyRole, new_key
from baton.wire.v1 import fleet_pb2, fleet_pb2_grpc
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

sys.path.insert(0, str(Path(__file__).parents[1] / "services" / "gateway" / "tests"))

from gateway_etcd import EtcdServer

pytestmark = [pytest.mark.integration, pytest.mark.long]

LEASE_S = 3
#: Enough for these answers; four servers and other tests share one machine.
NUM_PAGES = ("--num-pages", "256")
PROMPT = list(range(300, 420))
ADMIN, ADMIN_RECORD = new_key(KeyRole.ADMIN)
CLIENT, CLIENT_RECORD = new_key(KeyRole.CLIENT)


class SharedFleet:
    """Servers that put themselves into etcd, and gateways that find them there."""

    def __init__(self, model_path: Path, folder: Path) -> None:
        self.etcd = EtcdServer(folder / "etcd").start()
        self.fleet = Fleet(model_path, folder)
        self.gateways: list[Worker] = []
        self._key_file = folder / "keys"
        self._key_file.write_text(f"{ADMIN_RECORD.line()}\n{CLIENT_RECORD.line()}\n")

    def gateway(self) -> None:
        """One more."""
        flags = ("--etcd", self.etcd.endpoint, "--etcd-prefix", "/fleet-of-tests", "--api-key-file", str(self._key_file))
        ports = ("--port", str(free_port()), "--http-port", str(free_port()))
        command = self.fleet._command("gateway", *ports, "--model-path", str(self.fleet.model_path), "--model-name", MODEL, *flags)
        self.gateways.append(Worker(ServiceSpec(f"gateway-{len(self.gateways)}", command), self.fleet.run_dir).start().wait_ready())

    def server(self, make: Callable[..., Worker], *flags: str) -> Worker:
        return make("--etcd", self.etcd.endpoint, "--etcd-prefix", "/fleet-of-tests", "--lease-s", str(LEASE_S), *NUM_PAGES, *flags).start()

    def ready(self, gateway: Worker) -> dict[str, object]:
        """All of it: only clients with a key learn of the fleet."""
        found: dict[str, object] = httpx.get(
            f"http://{gateway.address('http')}/ready", headers={"authorization": f"Bearer {CLIENT}"}, timeout=5
        ).json()
        return found

    def wait_routes(self, num: int) -> None:
        """Both gateways have that many ways through the fleet."""
        wait_for(lambda: all(self.ready(one)["routes"] == num for one in self.gateways), 90, lambda: str([self.ready(one) for one in self.gateways]))

    def members(self, gateway: Worker) -> dict[str, fleet_pb2.WorkerState]:
        """What one gateway lists, by instance id."""
        with grpc.insecure_channel(gateway.address()) as channel:
            answer = fleet_pb2_grpc.FleetStub(channel).List(fleet_pb2.ListWorkersRequest(), metadata=self.metadata, timeout=10)
        return {state.info.instance_id: state for state in answer.workers}

    def wait_members(self, workers: list[Worker]) -> None:
        wanted = {worker.info().instance_id for worker in workers}
        wait_for(lambda: all(self.members(one).keys() == wanted for one in self.gateways), 30, lambda: str([self.members(g) for g in self.gateways]))

    @property
    def metadata(self) -> tuple[tuple[str, str]]:
        return (("authorization", f"Bearer {ADMIN}"),)

    def close(self) -> None:
        self.etcd.close()
        for gateway in self.gateways:
            gateway.stop()
        self.fleet.close()


@pytest.fixture
def shared(model_path: Path, tmp_path: Path) -> Iterator[SharedFleet]:
    shared = SharedFleet(model_path, tmp_path)
    yield shared
    shared.close()


def ask(gateway: Worker, num_tokens: int = 12) -> tuple[list[int], pb.RoomReport]:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling, report=True)
    with grpc.insecure_channel(gateway.address(), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        messages = list(InferenceStub(channel).Generate(request, timeout=120, metadata=(("authorization", f"Bearer {CLIENT}"),)))
    return [token for message in messages for token in message.token_ids], messages[-1].report


@pytest.mark.timeout(900)  # eight services start, one after the other; every wait has a limit of its own
def test_a_fleet_in_etcd_from_nothing_to_nothing(shared: SharedFleet) -> None:
    fleet = shared.fleet
    for _ in range(2):
        shared.gateway()
    for gateway in shared.gateways:
        assert "no server is known yet" in str(shared.ready(gateway)["problems"])

    prefill, decode = shared.server(fleet.prefill), shared.server(fleet.decode)
    for worker in (prefill, decode):
        worker.wait_ready()
    shared.wait_routes(1)
    answers = [ask(gateway) for gateway in shared.gateways]
    tokens = answers[0][0]
    assert [answer[0] for answer in answers] == [tokens, tokens]
    assert all(report.prefill_instance != report.decode_instance for _, report in answers)

    # Added while serving: a plain server beside the pair.
    plain = shared.server(fleet.plain).wait_ready()
    shared.wait_routes(2)
    plain_id = plain.info().instance_id

    # etcd dies: both gateways go on with what they know. A decode server dies meanwhile: the plain one takes over.
    shared.etcd.kill()
    wait_for(lambda: all("last known" in str(shared.ready(one)["problems"]) for one in shared.gateways), 30, "both gateways say that etcd is away")
    assert [ask(gateway)[0] for gateway in shared.gateways] == [tokens, tokens]
    decode.kill()
    fleet.workers.remove(decode)
    shared.wait_routes(1)
    for gateway in shared.gateways:
        again, report = ask(gateway)
        assert again == tokens
        assert report.decode_instance == plain_id

    # etcd comes back, and so does a decode server, as another process: the dead one is let go when its lease ends.
    shared.etcd.start()
    successor = shared.server(fleet.decode).wait_ready()
    shared.wait_routes(2)
    shared.wait_members([prefill, plain, successor])

    # An operator drains the plain server through one gateway while an answer comes from it through the other.
    first, second = shared.gateways
    with ThreadPoolExecutor(1) as pool:
        long, _ = ask(first, 200)
        under_way = pool.submit(lambda: next(answer for answer in iter(lambda: ask(second, 200), None) if answer[1].decode_instance == plain_id))
        wait_for(lambda: shared.members(second)[plain_id].rooms > 0, 60, "an answer under way on the plain server")
        with grpc.insecure_channel(first.address()) as channel:
            drain = fleet_pb2.DrainWorkerRequest(worker=fleet_pb2.WorkerName(instance_id=plain_id))
            fleet_pb2_grpc.FleetStub(channel).Drain(drain, metadata=shared.metadata, timeout=10)
        answer, report = under_way.result(timeout=120)
        assert answer == long
        assert report.decode_instance == plain_id
    shared.wait_members([prefill, successor])
    shared.wait_routes(1)
    for gateway in shared.gateways:
        again, report = ask(gateway)
        assert again == tokens
        assert report.decode_instance == successor.info().instance_id

    # A server that stops says so: nobody waits for its lease.
    fleet.assert_free()
    prefill.running.send(signal.SIGTERM)
    wait_for(lambda: all(shared.ready(one)["routes"] == 0 for one in shared.gateways), 30, "both gateways without a pair")
    prefill.running.wait(20)
    fleet.workers.remove(prefill)
    shared.wait_members([successor])
    assert all(httpx.get(f"http://{one.address('http')}/ready", timeout=5).status_code == 503 for one in shared.gateways)
    prefill.running.reap()
