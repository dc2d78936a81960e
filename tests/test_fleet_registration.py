"""A server that registers with a gateway over gRPC, both real processes, each of which ends and comes back while the other goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fleet import MODEL, Fleet, Worker, free_port, wait_for

from baton.cli.services import ServiceSpec

pytestmark = pytest.mark.integration

LEASE_S = 3
KEY = "a-key-for-the-servers-of-these-tests"


@pytest.fixture
def fleet(model_path: Path, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(model_path, tmp_path)
    key_file = tmp_path / "registration-key"
    key_file.write_text(f"# of these tests\n{KEY}\n")
    port, http_port = free_port(), free_port()
    flags = ("--port", str(port), "--http-port", str(http_port), "--registration", "--registration-key-file", str(key_file))
    command = fleet._command("gateway", *flags, "--model-path", str(model_path), "--model-name", MODEL)
    fleet.gateway = Worker(ServiceSpec("gateway", command), tmp_path)
    fleet.plain("--gateway-address", f"127.0.0.1:{port}", "--registration-key-file", str(key_file), "--lease-s", str(LEASE_S), "--num-pages", "256")
    yield fleet
    fleet.close()


def count(fleet: Fleet, what: str) -> int:
    """How many plain servers the gateway knows ("known"), or would use now ("usable"); -1: it does not answer."""
    try:
        return int(httpx.get(f"http://{fleet.http}/ready", timeout=5).json()["servers"]["plain"][what])
    except httpx.TransportError:
        return -1


def answer(fleet: Fleet) -> str:
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}
    response = httpx.post(f"http://{fleet.http}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.timeout(600)  # four services start, one after the other; every wait has a limit of its own
def test_a_server_and_its_gateway_find_each_other_whoever_comes_first(fleet: Fleet) -> None:
    gateway, worker = fleet.gateway, fleet.workers[0]
    assert gateway is not None
    worker.start().wait_ready()  # nobody is there to register with yet
    gateway.start().wait_ready()
    wait_for(lambda: count(fleet, "usable") == 1, 30, "the server registered")
    text = answer(fleet)
    assert "Paris" in text

    # The gateway dies; the next one on its port is told within a heartbeat.
    gateway.kill()
    gateway.start().wait_ready()
    wait_for(lambda: count(fleet, "usable") == 1, 30, "the server registered again")
    assert answer(fleet) == text

    # The server dies: its place is there until its lease ends. Its successor has another identity on the same port.
    before = worker.info().instance_id
    worker.kill()
    wait_for(lambda: count(fleet, "usable") == 0, 30, "the dead server not used")
    wait_for(lambda: count(fleet, "known") == 0, 30, "its lease over")
    assert f"its lease of {LEASE_S} s has expired" in gateway.running.log_path.read_text()
    worker.start().wait_ready()
    wait_for(lambda: count(fleet, "usable") == 1, 30, "the successor registered")
    assert worker.info().instance_id != before
    assert answer(fleet) == text

    # It stops: it says so, and is gone before its lease could have ended.
    worker.running.send(signal.SIGTERM)
    wait_for(lambda: count(fleet, "known") == 0, 30, "gone")
    assert '"reason": "it deregistered"' in gateway.running.log_path.read_text()
    assert worker.running.wait(20)
    worker.running.reap()
    fleet.workers.clear()
