"""The compose stack, really up: it answers, pages go through shared memory, TLS is mutual, and a rolling restart under load loses no request."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Self

import pytest
from machine import ROOT, Engine, NoEngineError, make_etcd, run, tool

sys.path.insert(0, str(ROOT / "deploy" / "scripts"))

from smoke import Front, chat

pytestmark = [pytest.mark.engine, pytest.mark.full]

IMAGES = {"cli": "libs/cli", "gateway": "services/gateway", "prefill": "services/prefill", "decode": "services/decode"}
TAG = "tests"
UP_S = 420
NUM_CLIENTS = 3
#: Requests that each client must have answered beside every restart.
ENOUGH = 2
STOP_S = 60


class Stack:
    """One compose project."""

    def __init__(self, here: Engine, *overlays: str, **settings: str) -> None:
        self.here = here
        self.ports = (free_port(), free_port())
        names = {"BATON_TAG": TAG, "BATON_HTTP_PORT": str(self.ports[0]), "BATON_GRPC_PORT": str(self.ports[1]), "BATON_KV_BYTES": str(256 << 20)}
        self.environment = {**here.environment, **names, **settings}
        files = [word for name in ("compose.yaml", *overlays) for word in ("--file", str(ROOT / "deploy" / "compose" / name))]
        # The project's name is that of its volumes: the model is fetched once.
        self._command = (tool("docker-compose"), "--project-name", "baton-tests", *files)

    def __call__(self, *words: str, timeout_s: float = 120) -> str:
        return run(*self._command, *words, env=self.environment, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        began = time.monotonic()
        try:
            self("up", "--detach", "--wait", "--no-build", "--pull", "never", timeout_s=UP_S)
        except (AssertionError, subprocess.TimeoutExpired):
            print(self("logs", "--tail", "20"))
            self("down", "--timeout", "5")
            raise
        print(f"up after {time.monotonic() - began:.0f} s")
        return self

    def __exit__(self, *_: object) -> None:
        self("down", "--timeout", "30", timeout_s=180)

    def containers(self, service: str) -> list[str]:
        return self("ps", "--quiet", service).split()

    def inspect(self, container: str) -> dict:  # type: ignore[type-arg]
        return json.loads(self.here("inspect", container))[0]

    def smoke(self, address: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "deploy" / "scripts" / "smoke.py"), address, "--wait-s", "60", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def images(here: Engine, context: Path) -> Iterator[Engine]:
    for name, folder in IMAGES.items():
        here.build(f"{folder}/Dockerfile", f"baton-{name}:{TAG}", context)
    yield here
    subprocess.run([here.docker, "volume", "rm", "baton-tests_models"], env=here.environment, capture_output=True, check=False)


def test_three_containers_answer_and_share_memory(images: Engine) -> None:
    with Stack(images) as stack:
        done = stack.smoke(f"http://127.0.0.1:{stack.ports[0]}")
        print(done.stdout)
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout
        status, ready = Front(f"http://127.0.0.1:{stack.ports[0]}", "", None, 10).get("/ready")
        assert (status, [path["transport"] for path in ready["paths"]]) == (200, ["sysv"])
        asked = (
            "run",
            "--rm",
            "--no-deps",
            "-T",
            "model",
            "chat",
            "--address",
            "gateway:8001",
            "--max-tokens",
            "16",
            "What is the capital of France?",
        )
        assert "Paris" in stack(*asked)
        for service in ("gateway", "prefill", "decode"):
            (container,) = stack.containers(service)
            about = stack.inspect(container)
            assert about["State"]["Health"]["Status"] == "healthy"
            assert (about["Config"]["User"], about["HostConfig"]["ReadonlyRootfs"]) == ("10001:10001", True)
        (decode,) = stack.containers("decode")
        images("stop", "--time", str(STOP_S), decode, timeout_s=STOP_S + 30)
        assert stack.inspect(decode)["State"]["ExitCode"] == 0
        stack("up", "--detach", "--wait", "--no-build", "--pull", "never", timeout_s=UP_S)
        again = stack.smoke(f"http://127.0.0.1:{stack.ports[0]}")
        assert again.returncode == 0, again.stderr


def test_mutual_tls(images: Engine, tmp_path: Path) -> None:
    with Stack(images, "mutual-tls.yaml") as stack:
        address = f"https://localhost:{stack.ports[0]}"
        for name in ("ca.pem", "cert.pem", "key.pem"):
            text = stack("run", "--rm", "-T", "--no-deps", "--entrypoint", "cat", "client-certificates", f"/certificates/client/{name}")
            (tmp_path / name).write_text(text)
        mine = ("--ca", str(tmp_path / "ca.pem"), "--cert", str(tmp_path / "cert.pem"), "--key", str(tmp_path / "key.pem"))
        done = stack.smoke(address, *mine)
        print(done.stdout)
        assert done.returncode == 0, done.stderr
        assert stack.smoke(address, "--ca", str(tmp_path / "ca.pem"), "--wait-s", "0").returncode == 1, "a client without a certificate was answered"
        (gateway,) = stack.containers("gateway")
        assert stack.here("exec", gateway, "ls", "/certificates").split() == ["ca.pem", "cert.pem", "client-ca.pem", "key.pem"]
        assert knocks(stack, "gateway", "prefill:8003") == "", "the gateway's certificate opens a server"
        assert "prefill:8003 does not answer: UNAVAILABLE" in knocks(stack, "client", "prefill:8003"), "a client's certificate opened a server"


def knocks(stack: Stack, who: str, address: str) -> str:
    """What healthy.py says of a server when it shows the certificate of `who`, on the stack's own network."""
    volume = f"baton-tests_{who}-certificates:/certificates:ro"
    files = [f"--tls-{name}-file=/certificates/{name}.pem" for name in ("cert", "key", "ca")]
    command = (
        "run",
        "--rm",
        "--network",
        "baton-tests_default",
        "--volume",
        volume,
        "--entrypoint",
        "python",
        f"baton-gateway:{TAG}",
        "/opt/healthy.py",
    )
    words = [stack.here.docker, *command, address, *files]
    return subprocess.run(words, env=stack.here.environment, capture_output=True, text=True, timeout=60, check=False).stderr


class Load:
    """Clients that ask without a pause, each time one of the gateways that are in rotation, as what stands before them would have it."""

    def __init__(self, addresses: list[str]) -> None:
        self.rotation = list(addresses)
        self.answered = [0] * NUM_CLIENTS
        self.failed: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        turn = number
        while not self._over.is_set():
            turn += 1
            address = self.rotation[turn % len(self.rotation)]
            try:
                body = chat("smollm2") | {"max_tokens": 24, "seed": turn}
                events = list(Front(address, "", None, 120).stream("/v1/chat/completions", body))
                if events[-1:] != ["[DONE]"]:
                    raise ValueError(f"the stream ends with {events[-1:]}")
            except Exception as error:
                self.failed.append(f"client {number} at {address}: {error!r}")
            else:
                self.answered[number] += 1

    def wait_enough(self) -> None:
        wanted = [count + ENOUGH for count in self.answered]
        deadline = time.monotonic() + 180
        while any(have < want for have, want in zip(self.answered, wanted, strict=True)):
            assert not self.failed, self.failed
            assert time.monotonic() < deadline, f"clients wait: {self.answered} of {wanted}"
            time.sleep(0.1)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def test_a_rolling_restart_under_load_loses_no_request(images: Engine) -> None:
    try:
        etcd = make_etcd(images)
    except NoEngineError as error:
        pytest.skip(f"NO LARGER FLEET WAS RUN: {error}")
    first = 20_000 + secrets.randbelow(10_000)
    ports = {"BATON_HTTP_PORT": f"{first}-{first + 1}", "BATON_GRPC_PORT": f"{first + 2}-{first + 3}"}
    with Stack(images, "scaled.yaml", ETCD_IMAGE=etcd, BATON_GATEWAYS="2", **ports) as stack:
        fronts = {container: http_address(stack, container) for container in stack.containers("gateway")}
        assert len(fronts) == 2
        load = Load(list(fronts.values()))
        try:
            load.wait_enough()
            for service in ("prefill", "decode", "gateway"):
                for container in stack.containers(service):
                    restart(stack, load, container, fronts)
                    load.wait_enough()
        finally:
            load.close()
        print(f"{sum(load.answered)} requests answered beside six restarts, {len(load.failed)} failed")
        assert not load.failed


def http_address(stack: Stack, container: str) -> str:
    port = stack.inspect(container)["NetworkSettings"]["Ports"]["8000/tcp"][0]["HostPort"]
    return f"http://127.0.0.1:{port}"


def restart(stack: Stack, load: Load, container: str, fronts: dict[str, str]) -> None:
    """One server, as a cluster does it: a gateway leaves the rotation first; SIGTERM; a new process; the next one only when this is healthy."""
    is_gateway = container in fronts
    if is_gateway:
        load.rotation.remove(fronts[container])
    stack.here("stop", "--time", str(STOP_S), container, timeout_s=STOP_S + 30)
    assert stack.inspect(container)["State"]["ExitCode"] == 0, stack.here("logs", "--tail", "20", container)
    stack.here("start", container)
    deadline = time.monotonic() + UP_S
    while stack.inspect(container)["State"]["Health"]["Status"] != "healthy":
        assert time.monotonic() < deadline, stack.here("logs", "--tail", "20", container)
        time.sleep(0.5)
    if is_gateway:
        fronts[container] = http_address(stack, container)
        load.rotation.append(fronts[container])
