"""One cell of the table: a request is led into a state and held there, a fault strikes, and what everyone says of it is written down."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import psutil
from faults.net import WIRES, Net
from fleet import Fleet, Worker, wait_for

from baton.wire.v1 import worker_pb2

TESTS = Path(__file__).parents[1]

STATES = ("BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS")
KILLS = tuple(f"kill {party}" for party in ("client", "gateway", "prefill", "decode"))
STOPS = tuple(f"stop {party}" for party in ("client", "gateway", "prefill", "decode"))
CUTS = tuple(f"cut {wire}" for wire in WIRES)
FAULTS = (*KILLS, *STOPS, *CUTS)

#: Longer than gRPC's keepalive takes to find that nobody is there (15 s).
CUT_S = 20.0
STOP_S = 10.0
#: A request's own deadline in the table: longer than any fault lasts.
DEADLINE_S = 60.0
TOLD_WITHIN_S = 25.0
#: A reset connection is noticed at once; the rest is a busy machine's.
NOTICED_WITHIN_S = 3.0
BACK_WITHIN_S = 40.0
#: An answer's length, and how much of a stream is proof that it goes on.
ENOUGH_TOKENS = 4
HOLDS = {"BOOTSTRAPPING": "bootstrapping", "WAITING": "waiting", "TRANSFERRING": "transferring", "SUCCESS": "slow 0.05"}
PROMPT = [100 + i * 7 % 4000 for i in range(256)]
LONG_ANSWER = 1200
UNDISTURBED = ("answered", "stream goes on")


@dataclass
class Outcome:
    """client: what it was told, or that its answer went on. counted: log lines of each service about the room. pages: when they were back.

    told_s: from the fault until the client was told. back_s: from the fault until all pages were free and all rooms over on every server that
    could be asked. quarantined: whether pages were seen in quarantine on the way, which may be for a moment only.
    """

    fault: str
    state: str
    client: str = ""
    counted: str = ""
    pages: str = ""
    told_s: float | None = None
    back_s: float | None = None
    quarantined: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.fault, self.state

    @property
    def facts(self) -> tuple[str, str, str]:
        """What is the same in every run."""
        return self.client, self.counted, self.pages


class Caller:
    """A client process and what it has printed so far."""

    def __init__(self, command: tuple[str, ...], request_id: str) -> None:
        self.request_id = request_id
        self.tokens: list[int] = []
        self.end: dict[str, str] | None = None
        self.ended_at = 0.0
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = json.loads(line)
            if "tokens" in words:
                self.tokens += words["tokens"]
            else:
                self.end, self.ended_at = words, time.monotonic()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self._reader.join()


class FaultFleet(Fleet):
    """Servers in namespaces, whose engines can be held."""

    def __init__(self, net: Net, model_path: Path, run_dir: Path) -> None:
        super().__init__(model_path, run_dir)
        self.net = net
        self.hold_file = run_dir / "hold"
        self.hold("")

    def hold(self, words: str) -> None:
        fresh = self.hold_file.with_suffix(f".{secrets.token_hex(4)}")
        fresh.write_text(words)
        fresh.rename(self.hold_file)

    def build(self) -> FaultFleet:
        metrics = ("--metrics-exporter", "prometheus", "--metrics-port", "0")
        # Each cell computes and moves the whole of the same prompt.
        common = ("--transport", "tcp", "--num-pages", "512", "--stall-limit-s", "300", "--no-prefix-cache", *metrics)
        self.prefill("--max-batched-tokens", "64", *common)
        self.decode("--digest", "all", *common)
        self.start("--stall-limit-s", "300", *metrics)
        return self

    def party(self, name: str) -> Worker:
        assert self.gateway is not None
        return self.gateway if name == "gateway" else self.by_kind(name)

    def call(self, request_id: str, max_tokens: int) -> Caller:
        words = (sys.executable, str(TESTS / "faults" / "caller.py"), self.grpc, request_id, str(max_tokens), str(DEADLINE_S))
        return Caller(self.net.command("client", *words, *map(str, PROMPT)), request_id)

    def _command(self, service: str, *flags: str) -> tuple[str, ...]:  # type: ignore[override]
        where = ("--host", "0.0.0.0", "--advertise-host", self.net.address(service))
        if service == "gateway":
            return self.net.command(service, sys.executable, "-m", "baton.gateway.app", *flags, *where)
        held = (sys.executable, str(TESTS / "faults" / "held_service.py"), service, str(self.hold_file))
        return self.net.command(service, "env", f"UCX_NET_DEVICES={self._devices(service)}", *held, *flags, *where)

    def _devices(self, service: str) -> str:
        """Which network devices KV pages may take."""
        return self.net.card("prefill-decode", service)


@dataclass
class Log:
    """What a service has logged since this was made."""

    path: Path
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        self.offset = self.path.stat().st_size

    def lines(self) -> list[dict[str, object]]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            raw = file.read().decode("utf-8", "replace").splitlines()
        return [json.loads(line) for line in raw if line.startswith("{") and line.endswith("}")]


class Watch:
    """Looks at every server that can be asked, again and again: since when all is free there, and what was seen quarantined."""

    def __init__(self, fleet: FaultFleet) -> None:
        self._fleet = fleet
        self._over = threading.Event()
        self.free_since: float | None = None
        self.quarantined = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            at = time.monotonic()
            loads = [load for worker in self._fleet.workers if (load := _load(worker)) is not None]
            free = bool(loads) and all(load.free_pages == load.total_pages and not load.rooms for load in loads)
            self.quarantined |= any(load.quarantined_pages for load in loads)
            if not free:
                self.free_since = None
            elif self.free_since is None:
                self.free_since = at

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def _load(worker: Worker) -> worker_pb2.WorkerLoad | None:
    """None when it is dead or frozen: it has nothing to say then."""
    process = psutil.Process(worker.running.pid) if worker.running.exit_text() is None else None
    if process is None or process.status() == psutil.STATUS_STOPPED:
        return None
    with contextlib.suppress(grpc.RpcError, AssertionError):
        return worker.info().load
    return None


def drive(fleet: FaultFleet, fault: str, state: str, *, stop_s: float = STOP_S, cut_s: float = CUT_S) -> Outcome:
    """Runs one cell and leaves the fleet as it was, every server up and every page free."""
    outcome = Outcome(fault, state)
    logs = {name: Log(fleet.party(name).running.log_path) for name in ("gateway", "prefill", "decode")}
    fleet.hold(HOLDS[state])
    caller = fleet.call(f"cell-{secrets.token_hex(4)}", LONG_ANSWER if state == "SUCCESS" else ENOUGH_TOKENS)
    watch: Watch | None = None
    try:
        reach(logs["gateway"], caller, state)
        watch = Watch(fleet)
        wait_for(lambda: watch.free_since is None, 10, "the room seen on a server")
        began = time.monotonic()
        over = strike(fleet, fault, caller, stop_s, cut_s)
        if state != "SUCCESS":  # a long answer goes on at its pace
            fleet.hold("")
        _observe(fleet, caller, outcome, began)
        outcome.counted = counted(logs, caller.request_id)
        caller.close()
        wait_for(lambda: watch.free_since is not None, BACK_WITHIN_S, lambda: f"pages back after {fault} in {state}: {fleet.not_free()}")
        outcome.back_s = (watch.free_since or began) - began
        outcome.pages = _pages(outcome, over - began)
        outcome.quarantined = watch.quarantined
        if outcome.client not in UNDISTURBED:
            outcome.counted = counted(logs, caller.request_id)  # what comes late is counted too
    finally:
        fleet.hold("")
        caller.close()
        if watch is not None:
            watch.close()
    return outcome


def reach(log: Log, caller: Caller, state: str) -> None:
    """Waits until the gateway says that the room is in `state`."""

    def there() -> bool:
        assert caller.end is None, f"the request ended before the fault: {caller.end}"
        mine = [line for line in log.lines() if line.get("request_id") == caller.request_id]
        states = ["BOOTSTRAPPING" for line in mine if line["event"] == "room opened"] + [line["state"] for line in mine if line["event"] == "room"]
        return bool(states) and states[-1] == state and (state != "SUCCESS" or len(caller.tokens) >= ENOUGH_TOKENS)

    wait_for(there, 60, lambda: f"the room in {state}: {log.lines()}")


def strike(fleet: FaultFleet, fault: str, caller: Caller, stop_s: float, cut_s: float) -> float:
    """Does it, and undoes it where it has an end; returns when it was over (time.monotonic())."""
    kind, where = fault.split(" ")
    if kind == "cut":
        fleet.net.cut(where)
        try:
            time.sleep(cut_s)
        finally:
            fleet.net.heal(where)
        return time.monotonic()
    send: Callable[[signal.Signals], None] = caller.process.send_signal if where == "client" else fleet.party(where).running.send
    if kind == "kill":
        send(signal.SIGKILL)
        began = time.monotonic()
        while caller.end is None and caller.process.poll() is None and time.monotonic() < began + NOTICED_WITHIN_S:
            time.sleep(0.02)  # the room stays in its state until it is noticed
        return began
    send(signal.SIGSTOP)
    try:
        time.sleep(stop_s)
    finally:
        send(signal.SIGCONT)
    return time.monotonic()


def _observe(fleet: FaultFleet, caller: Caller, outcome: Outcome, began: float) -> None:
    """What the client sees: it is told, it is answered, or (a long answer) its stream goes on after the fault."""
    if outcome.fault == "kill client":
        outcome.client = "(gone)"
        return
    had = len(caller.tokens)

    def seen() -> bool:
        return caller.end is not None or (outcome.state == "SUCCESS" and len(caller.tokens) >= had + 2 * ENOUGH_TOKENS)

    wait_for(seen, TOLD_WITHIN_S, lambda: f"the client hangs after {outcome.fault} in {outcome.state}: {fleet.not_free()}")
    if caller.end is None:
        outcome.client = "stream goes on"
        return
    outcome.client = told(caller.end)
    if caller.end["code"] != "OK":
        outcome.told_s = caller.ended_at - began


def told(end: dict[str, str]) -> str:
    if end["code"] == "OK":
        return "answered"
    if not end["cause"]:
        return f"{end['code']} from its own gRPC"
    return f"{end['code']} {end['cause']} ({end['origin']}, {end['stage']})"


def counted(logs: dict[str, Log], request_id: str) -> str:
    """Each service's "room failed" (origin, cause) about the request's rooms, and revokes that nobody answered."""
    opened = [line for line in logs["gateway"].lines() if line.get("request_id") == request_id and line["event"] == "room opened"]
    rooms = {line["room"] for line in opened}
    found = []
    for name, log in logs.items():
        for line in log.lines():
            if line.get("room") not in rooms:
                continue
            if line["event"] == "room failed":
                found.append(f"{name}: {line['cause']} ({line['origin']})")
            elif line["event"] == "revoke without an answer":
                found.append(f"{name}: revoke overdue")
    return "; ".join(dict.fromkeys(found)) or "nothing"


def _pages(outcome: Outcome, over_s: float) -> str:
    assert outcome.back_s is not None
    kind = outcome.fault.split(" ")[0]
    after = {"kill": "at once", "stop": "when it goes on", "cut": "when it is healed"}[kind]
    if outcome.client in UNDISTURBED:
        return "with the answer's end"
    return "while the fault lasts" if kind != "kill" and outcome.back_s < over_s else after


def restore(fleet: FaultFleet) -> None:
    """Starts what was killed, waits until the pair is in use again and answers, and asserts that everything is free."""
    for name in ("prefill", "decode", "gateway"):
        worker = fleet.party(name)
        if worker.running.exit_text() is not None:
            worker.running.reap()
            worker.start().wait_ready()
    fleet.note_pids()
    wait_for(fleet.ready, 60, "the pair usable again")
    caller = fleet.call(f"after-{secrets.token_hex(4)}", ENOUGH_TOKENS)
    try:
        wait_for(lambda: caller.end is not None, 60, "an answer after the fault")
        assert caller.end == {"code": "OK"}, caller.end
    finally:
        caller.close()
    fleet.assert_free(20)


Made = TypeVar("Made", bound=FaultFleet)


@contextlib.contextmanager
def fault_fleet(kind: type[Made], model_path: Path, run_dir: Path) -> Iterator[Made]:
    with Net() as net:
        fleet = kind(net, model_path, run_dir)
        try:
            fleet.build()
            yield fleet
        except BaseException:
            for worker in fleet._all():
                worker.running.reap()
            raise
        fleet.close()
