"""Two prefill servers, two decode servers and two gateways, in etcd where there is one, and what they hold of the machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from fleet import Fleet, Worker, free_port, segments_of, wait_for
from soak.etcd import Etcd, installed

from baton.cli.services import ServiceSpec

NUM_OF_EACH = 2
NUM_ROUTES = NUM_OF_EACH * NUM_OF_EACH
#: Under hundreds of clients and other work on the same cores.
IN_USE_WITHIN_S = 300.0


@dataclass(frozen=True)
class Held:
    """What one process holds while nothing is asked of it. memory_mib: its own alone, so without the pool of KV pages, which is shared memory."""

    name: str
    memory_mib: float
    descriptors: int
    threads: int
    rooms: int
    pages: int


class House(Fleet):
    """`gateways` beside Fleet's servers. Every process keeps its flags and ports when it is started again."""

    def __init__(self, model_path: Path, run_dir: Path, request_timeout_s: float) -> None:
        super().__init__(model_path, run_dir)
        self._request_timeout_s = request_timeout_s
        self.gateways: list[Worker] = []
        self.etcd = Etcd(run_dir / "etcd") if installed() else None

    @property
    def fleet_is(self) -> str:
        return "in etcd" if self.etcd is not None else "named on the gateways' command lines: there is no etcd on this machine"

    def build(self) -> House:
        """Small pools, and one thread of arithmetic each: six processes share what cores and memory there are."""
        joined = ("--etcd", self.etcd.start().endpoint) if self.etcd is not None else ()
        small = ("--threads", "1", "--num-pages", "512")
        for _ in range(NUM_OF_EACH):
            self.prefill(*small, *joined)
            self.decode("--digest", "all", *small, *joined)
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            worker.wait_ready()
        named = joined or tuple(flag for kind in ("prefill", "decode") for flag in (f"--{kind}", ",".join(self._addresses(kind))))
        for number in range(NUM_OF_EACH):
            ports = ("--port", str(free_port()), "--http-port", str(free_port()))
            limits = ("--request-timeout-s", str(self._request_timeout_s))
            model = ("--model-path", str(self.model_path), "--model-name", "smollm2")
            command = self._command("gateway", *ports, *model, *limits, *named)
            self.gateways.append(Worker(ServiceSpec(f"gateway-{number}", command), self.run_dir).start())
        for gateway in self.gateways:
            gateway.wait_ready()
        self.gateway = self.gateways[0]
        self.wait_in_use()
        self.note_pids()
        return self

    def wait_in_use(self) -> float:
        """Until both gateways have every pair; seconds that it took."""
        return wait_for(lambda: all(self.routes(gateway) == NUM_ROUTES for gateway in self.gateways), IN_USE_WITHIN_S, self._routes_text)

    def routes(self, gateway: Worker) -> int:
        try:
            return int(httpx.get(f"http://{gateway.address('http')}/ready", timeout=5).json()["routes"])
        except httpx.TransportError:
            return -1

    def held(self) -> list[Held]:
        """Of each process, once nothing runs."""
        found = []
        for worker in self._all():
            process = psutil.Process(worker.running.pid)
            load = None if worker in self.gateways else worker.info().load
            rooms = self._open_requests(worker) if load is None else load.rooms
            pages = 0 if load is None else load.total_pages - load.free_pages
            memory_mib = process.memory_full_info().uss / 2**20
            found.append(Held(worker.spec.name, memory_mib, process.num_fds(), process.num_threads(), rooms, pages))
        return found

    def wait_quiet(self, timeout_s: float) -> None:
        """No page, no room and no request is held anywhere."""
        self.assert_free(timeout_s)
        wait_for(lambda: not any(self._open_requests(gateway) for gateway in self.gateways), timeout_s, "requests open on a gateway")

    def shared_memory_mib(self) -> float:
        """System V segments made by any process of this house, also one that was killed, and files in /dev/shm that those which live have mapped."""
        segments = sum(int(row.split()[3]) for row in segments_of(self._pids))
        files: dict[str, int] = {}
        for worker in self._all():
            for line in Path(f"/proc/{worker.running.pid}/maps").read_text().splitlines():
                span, *_, name = line.split(maxsplit=5)
                if name.startswith("/dev/shm/"):
                    first, end = (int(word, 16) for word in span.split("-"))
                    files[name] = max(files.get(name, 0), end - first)
        return float(segments + sum(files.values())) / 2**20

    def close(self) -> None:
        """Cleanly, and asserts that no process and no shared memory is left."""
        try:
            super().close()
        finally:
            if self.etcd is not None:
                self.etcd.stop()

    def kill_all(self) -> None:
        for worker in self._all():
            worker.running.reap()
        if self.etcd is not None:
            self.etcd.stop()

    def _all(self) -> Iterable[Worker]:
        return [worker for worker in (*self.workers, *self.gateways) if worker.service is not None]

    def _addresses(self, kind: str) -> list[str]:
        return [worker.address() for worker in self.workers if worker.spec.name.startswith(kind)]

    def _open_requests(self, gateway: Worker) -> int:
        return int(httpx.get(f"http://{gateway.address('http')}/ready", timeout=5).json()["rooms"])

    def _routes_text(self) -> str:
        ready = [httpx.get(f"http://{gateway.address('http')}/ready", timeout=5).json() for gateway in self.gateways]
        return f"{NUM_ROUTES} routes on each gateway: {[(one['routes'], one['problems']) for one in ready]}"
