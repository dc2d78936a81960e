"""`baton fleet` against a real gRPC server whose answers the test writes."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from baton.cli.errors import CallError
from baton.cli.main import typer_app
from baton.wire.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, worker_pb2


class Scripted(fleet_pb2_grpc.FleetServicer):
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.keys: list[str] = []

    def _note(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        self.keys.append(dict(context.invocation_metadata()).get("authorization", ""))

    def List(self, request: Any, context: Any) -> fleet_pb2.ListWorkersResponse:  # noqa: N802
        self._note(request, context)
        load = worker_pb2.WorkerLoad(total_pages=64, free_pages=60, tokens_in_flight=7)
        busy = fleet_pb2.WorkerState(
            address="10.0.0.1:8004", role=common_pb2.ROLE_DECODE, sources=["etcd"], connected=True, rooms=2,
            info=worker_pb2.WorkerInfo(instance_id="decode-1", load=load),
        )  # fmt: skip
        away = fleet_pb2.WorkerState(address="10.0.0.2:8003", role=common_pb2.ROLE_PREFILL, sources=["named"], unusable_because="not connected yet")
        return fleet_pb2.ListWorkersResponse(gateway_id="gateway-1", workers=[busy, away], problems=["prefill server ? [away]: not connected yet"])

    def Add(self, request: Any, context: Any) -> fleet_pb2.AddWorkerResponse:  # noqa: N802
        self._note(request, context)
        return fleet_pb2.AddWorkerResponse()

    def Drain(self, request: Any, context: Any) -> fleet_pb2.DrainWorkerResponse:  # noqa: N802
        self._note(request, context)
        return fleet_pb2.DrainWorkerResponse(rooms=3)

    def Remove(self, request: Any, context: Any) -> fleet_pb2.RemoveWorkerResponse:  # noqa: N802
        self._note(request, context)
        if request.worker.instance_id == "nobody":
            context.abort(grpc.StatusCode.NOT_FOUND, "no worker 'nobody' is in this gateway's fleet")
        return fleet_pb2.RemoveWorkerResponse(rooms=1)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Scripted, str]]:
    monkeypatch.setenv("BATON_API_KEY", "baton-key")
    servicer, server = Scripted(), grpc.server(ThreadPoolExecutor(2))
    fleet_pb2_grpc.add_FleetServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    stopped: threading.Event = server.stop(0)
    stopped.wait(5)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(typer_app, ["fleet", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list_shows_each_server_and_every_problem(gateway: tuple[Scripted, str]) -> None:
    servicer, address = gateway
    text = run("list", "--gateway", address)
    assert "gateway gateway-1 is not ready" in text
    assert "decode-1" in text
    assert "60 of 64" in text
    assert "problem: prefill server ? [away]: not connected yet" in text
    assert servicer.keys == ["Bearer baton-key"]


def test_add_drain_and_remove_say_what_they_were_told(gateway: tuple[Scripted, str]) -> None:
    servicer, address = gateway
    assert "is in the fleet" in run("add", "plain", "10.0.0.9:8004", "--gateway", address)
    assert "3 requests" in run("drain", "decode-1", "--gateway", address)
    assert "1 requests there were ended" in run("remove", "10.0.0.1:8004", "--now", "--gateway", address)
    assert servicer.asked == [
        fleet_pb2.AddWorkerRequest(role=common_pb2.ROLE_PLAIN, address="10.0.0.9:8004"),
        fleet_pb2.DrainWorkerRequest(worker=fleet_pb2.WorkerName(instance_id="decode-1")),
        fleet_pb2.RemoveWorkerRequest(worker=fleet_pb2.WorkerName(address="10.0.0.1:8004"), now=True),
    ]


def test_a_refusal_is_one_explained_line(gateway: tuple[Scripted, str]) -> None:
    with pytest.raises(CallError, match=r"answered NOT_FOUND: no worker 'nobody'"):
        run("remove", "nobody", "--gateway", gateway[1])
