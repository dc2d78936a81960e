"""`baton fleet` against a real gRPC server whose answers the test writes."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from typer.testing import CliRunner

from baton.cli.errors import CallError, UsageError
from baton.cli.main import typer_app
from baton.wire.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, worker_pb2

#: Wider together than any terminal that a test is run in.
LONG_ID = "decode-" + "0123456789abcdef" * 8
LONG_ADDRESS = "decode-0.decode.inference.svc.cluster.local." + "example." * 8 + "org:8004"


class Scripted(fleet_pb2_grpc.FleetServicer):
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.keys: list[str] = []

    def _note(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        self.keys.append(dict(context.invocation_metadata()).get("authorization", ""))

    def List(self, request: Any, context: Any) -> fleet_pb2.ListWorkersResponse:  # noqa: N802
        if context is not None:
            self._note(request, context)
        load = worker_pb2.WorkerLoad(total_pages=64, free_pages=60, tokens_in_flight=7)
        busy = fleet_pb2.WorkerState(
            address=LONG_ADDRESS, role=common_pb2.ROLE_DECODE, sources=["etcd"], connected=True, rooms=2,
            info=worker_pb2.WorkerInfo(instance_id=LONG_ID, load=load),
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
    text = run("list", "--address", address)
    assert "gateway gateway-1 is not ready" in text
    row = next(line for line in text.splitlines() if line.startswith("decode"))
    assert row.split()[:4] == ["decode", LONG_ID, LONG_ADDRESS, "etcd"], "nothing is cut where the output is no terminal"
    assert "60 of 64" in text
    assert "problem: prefill server ? [away]: not connected yet" in text
    assert servicer.keys == ["Bearer baton-key"]


def test_list_as_json_is_the_whole_answer(gateway: tuple[Scripted, str]) -> None:
    servicer, address = gateway
    found = json.loads(run("list", "--json", "--address", address))
    assert ParseDict(found, fleet_pb2.ListWorkersResponse()) == servicer.List(None, None)
    assert found["workers"][0]["info"]["instance_id"] == LONG_ID
    assert found["ready"] is False


def test_a_key_may_come_from_a_file(gateway: tuple[Scripted, str], tmp_path: Path) -> None:
    servicer, address = gateway
    file = tmp_path / "key"
    file.write_text("another-key\n")
    run("list", "--address", address, "--api-key-file", str(file))
    assert servicer.keys == ["Bearer another-key"]
    file.write_text("")
    with pytest.raises(UsageError, match=r"--api-key-file .* must hold one key, .* but holds 0 words"):
        run("list", "--address", address, "--api-key-file", str(file))


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (("chat",), ("hello",)),
        (("fleet", "list"), ()),
        (("fleet", "add"), ("plain", "10.0.0.9:8004")),
        (("fleet", "drain"), ("decode-1",)),
        (("fleet", "remove"), ("decode-1",)),
        (("bench", "run"), ("--target", "grpc://127.0.0.1:1", "--model", "m")),
        (("plan", "calibrate"), ("--plain", "grpc://127.0.0.1:1", "--model", "m")),
    ],
)
def test_every_client_has_the_same_flags(command: tuple[str, ...], needs: tuple[str, ...], tmp_path: Path) -> None:
    """And says the same of those that do not go together."""
    pem = tmp_path / "cert.pem"
    with pytest.raises(UsageError, match=r"--tls-cert-file and --tls-key-file go together"):
        CliRunner().invoke(typer_app, [*command, *needs, "--tls-cert-file", str(pem)], catch_exceptions=False)
    pair = ("--tls-cert-file", str(pem), "--tls-key-file", str(pem))
    with pytest.raises(UsageError, match=r"--tls-cert-file is set without --tls-ca-file"):
        CliRunner().invoke(typer_app, [*command, *needs, *pair], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"--api-key-file .* cannot be read"):
        CliRunner().invoke(typer_app, [*command, *needs, "--api-key-file", str(pem)], catch_exceptions=False)


def test_add_drain_and_remove_say_what_they_were_told(gateway: tuple[Scripted, str]) -> None:
    servicer, address = gateway
    assert "is in the fleet" in run("add", "plain", "10.0.0.9:8004", "--address", address)
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
