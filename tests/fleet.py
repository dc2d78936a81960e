"""Real services as child processes for the tests: start, kill, suspend, restart on the same ports, and prove that nothing is left."""

from __future__ import annotations

import itertools
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import grpc
import psutil

from baton.cli.services import Service, ServiceSpec
from baton.cli.services.process import ReadyRecord
from baton.wire.v1 import worker_pb2
from baton.wire.v1.worker_pb2_grpc import WorkerStub

START_S = 300.0
DRAIN_S = 10.0
PAGE_SIZE = 16
MODEL = "smollm2"


#: In an order of this process's own, so that none is given twice before its service listens.
_PORTS = itertools.cycle(random.SystemRandom().sample(range(12_000, 32_000), 20_000))


def free_port() -> int:
    """Below the range from which the system numbers outgoing connections: a client that calls a service which is down could otherwise be given
    that very port, connect to itself, and keep the service from starting again."""
    while True:
        port = next(_PORTS)
        with closing(socket.socket()) as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def wait_for(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str] | str) -> float:
    """Seconds that it took. Fails with `what` when it takes longer than `timeout_s`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what() if callable(what) else what}")
        time.sleep(0.02)
    return time.monotonic() - start


class Worker:
    """One service that can be killed and started again under the same flags and ports."""

    def __init__(self, spec: ServiceSpec, run_dir: Path) -> None:
        self.spec = spec
        self.run_dir = run_dir
        self.service: Service | None = None
        self.record: ReadyRecord | None = None

    def start(self) -> Worker:
        self.service = Service(self.spec, self.run_dir, DRAIN_S)
        return self

    def wait_ready(self, timeout_s: float = START_S) -> Worker:
        service = self.running

        def is_ready() -> bool:
            assert service.exit_text() is None, service.log_path.read_text()[-4000:]
            self.record = service.ready()
            return self.record is not None

        wait_for(is_ready, timeout_s, lambda: f"{self.spec.name} ready: {service.last_lines()}")
        return self

    @property
    def running(self) -> Service:
        assert self.service is not None, f"{self.spec.name} was not started"
        return self.service

    def address(self, name: str = "grpc") -> str:
        assert self.record is not None, f"{self.spec.name} is not ready"
        return self.record.addresses[name]

    def info(self) -> worker_pb2.WorkerInfo:
        with grpc.insecure_channel(self.address()) as channel:
            return WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=10)

    def kill(self) -> None:
        self.running.send(signal.SIGKILL)
        self.running.reap()

    def stop(self) -> None:
        """A clean end; fails if the drain did not end it with status 0."""
        self.running.send(signal.SIGTERM)
        ended = self.running.wait(DRAIN_S + 10)
        text = self.running.exit_text()
        self.running.reap()
        assert ended, f"{self.spec.name} did not end: {self.running.last_lines()}"
        assert text == "exited with status 0", f"{self.spec.name} {text}: {self.running.last_lines()}"


class Fleet:
    """A gateway and the servers behind it. Close it: it asserts that nothing is left."""

    def __init__(self, model_path: Path, run_dir: Path) -> None:
        self.model_path = model_path
        self.run_dir = run_dir
        self.workers: list[Worker] = []
        self.gateway: Worker | None = None
        self._pids: set[int] = set()
        run_dir.mkdir(parents=True, exist_ok=True)

    def prefill(self, *flags: str) -> Worker:
        return self._worker("prefill", "--bootstrap-port", str(free_port()), *flags)

    def decode(self, *flags: str) -> Worker:
        return self._worker("decode", "--role", "decode", *flags)

    def plain(self, *flags: str) -> Worker:
        return self._worker("decode", "--role", "plain", *flags)

    def start(self, *flags: str) -> Fleet:
        """Starts every worker, then the gateway (with `flags`) that is told where they are."""
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            worker.wait_ready()
        kinds: dict[str, list[str]] = {}
        for worker in self.workers:
            kinds.setdefault(worker.spec.name.split("-")[0], []).append(worker.address())
        named = [flag for kind, addresses in kinds.items() for flag in (f"--{kind}", ",".join(addresses))]
        ports = ("--port", str(free_port()), "--http-port", str(free_port()))
        command = self._command("gateway", *ports, "--model-path", str(self.model_path), "--model-name", MODEL, *named, *flags)
        self.gateway = Worker(ServiceSpec("gateway", command), self.run_dir).start().wait_ready()
        wait_for(self.ready, 120, "the gateway ready for requests")
        self.note_pids()
        return self

    def note_pids(self) -> None:
        self._pids |= {worker.running.pid for worker in self._all()}

    def ready(self) -> bool:
        """Whether the gateway says that it has a usable pair or plain server."""
        import httpx

        try:
            return httpx.get(f"http://{self.http}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def http(self) -> str:
        assert self.gateway is not None
        return self.gateway.address("http")

    @property
    def grpc(self) -> str:
        assert self.gateway is not None
        return self.gateway.address("grpc")

    def by_kind(self, kind: str) -> Worker:
        return next(worker for worker in self.workers if worker.spec.name.startswith(kind))

    def not_free(self) -> list[str]:
        """What is still held on any worker, in words; empty when every page is free and no room is open."""
        held = []
        for worker in self.workers:
            load = worker.info().load
            if load.free_pages != load.total_pages or load.rooms or load.quarantined_pages or load.published_pages or load.reserved_pages:
                held.append(f"{worker.spec.name}: {load.free_pages} of {load.total_pages} pages free, {load.rooms} rooms, "
                            f"{load.published_pages} published, {load.quarantined_pages} quarantined")  # fmt: skip
        return held

    def assert_free(self, timeout_s: float = 5.0) -> float:
        """Every page comes back and no room stays open, within the time."""
        return wait_for(lambda: not self.not_free(), timeout_s, lambda: "; ".join(self.not_free()))

    def close(self) -> None:
        """Ends everything cleanly and asserts that no process and no shared memory is left."""
        self.note_pids()
        try:
            if self.gateway is not None:
                self.gateway.stop()
            for worker in self.workers:
                worker.stop()
        finally:
            for worker in self._all():
                worker.running.reap()
        left = [pid for pid in self._pids if psutil.pid_exists(pid)]
        assert not left, f"processes left: {left}"
        assert not segments_of(self._pids), "shared memory left"

    def _all(self) -> Iterable[Worker]:
        return [worker for worker in (*self.workers, self.gateway) if worker is not None and worker.service is not None]

    def _worker(self, service: str, *flags: str) -> Worker:
        kind = "plain" if "plain" in flags else service
        name = f"{kind}-{secrets.token_hex(3)}"
        port = () if "--port" in flags else ("--port", str(free_port()))
        common = ("--model-path", str(self.model_path), "--model-name", MODEL, "--page-size", str(PAGE_SIZE))
        worker = Worker(ServiceSpec(name, self._command(service, *port, *common, *flags)), self.run_dir)
        self.workers.append(worker)
        return worker

    @staticmethod
    def _command(service: str, *flags: str) -> tuple[str, ...]:
        return (sys.executable, "-m", f"baton.{service}.app", *flags)


def segments_of(pids: set[int]) -> list[str]:
    """System V segments made by one of `pids`, from the kernel's table."""
    rows = Path("/proc/sysvipc/shm").read_text().splitlines()[1:] if os.path.exists("/proc/sysvipc/shm") else []
    return [row for row in rows if int(row.split()[4]) in pids]
