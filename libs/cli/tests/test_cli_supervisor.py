"""The supervisor over real child processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.errors import ServiceLostError, ServiceStartError
from baton.cli.services import LogFollower, ServiceSpec, StopAskedError, Supervisor

TINY = Path(__file__).with_name("tiny_service.py")
READY_S = 20


def spec(name: str, behaviour: str = "good") -> ServiceSpec:
    return ServiceSpec(name, (sys.executable, str(TINY), behaviour))


def assert_gone(*pids: int) -> None:
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"left behind: {alive}"
        time.sleep(0.02)


def test_services_become_ready_and_leave_with_the_supervisor(tmp_path: Path) -> None:
    with Supervisor(tmp_path, drain_timeout_s=5) as supervisor:
        services = [supervisor.start(spec(name)) for name in ("one", "two", "front")]
        records = supervisor.wait_ready(services, READY_S)
        assert {name: record.pid for name, record in records.items()} == {service.name: service.pid for service in services}
        supervisor.check()
        pids = [service.pid for service in services]
    assert_gone(*pids)
    assert all(service.log_path.read_text().endswith("stopping\n") for service in services)
    assert not psutil.Process().children()


def test_one_that_ends_early_is_named_with_its_last_words_and_takes_the_others_along(tmp_path: Path) -> None:
    with Supervisor(tmp_path, 5) as supervisor:
        services = [supervisor.start(spec("good")), supervisor.start(spec("bad", "dies"))]
        with pytest.raises(ServiceStartError, match=r"(?s)bad exited with status 3 before it was ready.*bad\.log.*frobnicator"):
            supervisor.wait_ready(services, READY_S)
    assert_gone(*(service.pid for service in services))


@pytest.mark.parametrize("behaviour", ["never-ready", "not-serving"])
def test_one_that_is_never_ready_or_never_serving_is_named_when_the_time_is_over(tmp_path: Path, behaviour: str) -> None:
    with Supervisor(tmp_path, 5) as supervisor:
        slow = supervisor.start(spec("slow", behaviour))
        with pytest.raises(ServiceStartError, match=r"(?s)not ready within 2 s: slow;.*starting"):
            supervisor.wait_ready([slow], 2)
    assert_gone(slow.pid)


def test_a_killed_service_ends_the_watch_and_the_others(tmp_path: Path) -> None:
    with Supervisor(tmp_path, 5) as supervisor:
        services = [supervisor.start(spec(name)) for name in ("one", "two", "front")]
        supervisor.wait_ready(services, READY_S)
        threading.Timer(0.2, os.kill, (services[1].pid, signal.SIGKILL)).start()
        with pytest.raises(ServiceLostError, match="two was killed by SIGKILL while it was serving"):
            supervisor.watch()
    assert_gone(*(service.pid for service in services))


def test_one_that_ignores_sigterm_is_killed_with_its_children_after_its_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cli.services.supervisor.KILL_MARGIN_S", 0.5)
    supervisor = Supervisor(tmp_path, drain_timeout_s=2)
    services = [supervisor.start(spec("deaf", "ignores-term")), supervisor.start(spec("front"))]
    supervisor.wait_ready(services, READY_S)
    assert supervisor.stop() == ["deaf"]
    assert_gone(*(service.pid for service in services))
    assert supervisor.stop() == []


def test_one_that_people_keep_calling_while_it_stops_is_not_killed(tmp_path: Path) -> None:
    """It keeps them waiting for as long as it may, to tell each of them."""
    supervisor = Supervisor(tmp_path, drain_timeout_s=0)
    front = supervisor.start(spec("front", "batons-own"))
    address = supervisor.wait_ready([front], READY_S)["front"].addresses["grpc"]
    begun, over = threading.Event(), threading.Event()

    def call() -> None:
        with grpc.insecure_channel(address) as channel:
            stub, calls = health_pb2_grpc.HealthStub(channel), []
            stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            begun.set()
            while not over.wait(0.005):
                calls.append(stub.Check.future(health_pb2.HealthCheckRequest(), timeout=20))

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(20)
    assert supervisor.stop() == []
    over.set()
    caller.join()


def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    cut_short = threading.Event()
    supervisor = Supervisor(tmp_path, drain_timeout_s=60, cut_short=cut_short)
    deaf = supervisor.start(spec("deaf", "ignores-term"))
    supervisor.wait_ready([deaf], READY_S)
    cut_short.set()
    started = time.monotonic()
    assert supervisor.stop() == ["deaf"]
    assert time.monotonic() - started < 5
    assert_gone(deaf.pid)


def test_a_stop_while_starting_is_heard_at_once(tmp_path: Path) -> None:
    stop = threading.Event()
    with Supervisor(tmp_path, 5, stop) as supervisor:
        slow = supervisor.start(spec("slow", "never-ready"))
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(StopAskedError):
            supervisor.wait_ready([slow], 60)
    assert_gone(slow.pid)


def test_services_end_when_the_supervisors_process_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys, pathlib, time
        from baton.cli.services import ServiceSpec, Supervisor
        supervisor = Supervisor(pathlib.Path(sys.argv[1]), 2)
        services = [supervisor.start(ServiceSpec(name, (sys.executable, sys.argv[2], "good"))) for name in ("one", "two")]
        supervisor.wait_ready(services, 20)
        print(*(service.pid for service in services), flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(TINY)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    assert_gone(*pids)


def test_what_a_killed_service_started_does_not_stay(tmp_path: Path) -> None:
    with Supervisor(tmp_path, 5) as supervisor:
        parent = supervisor.start(spec("parent", "has-child"))
        supervisor.wait_ready([parent], READY_S)
        child_pid = int(parent.log_path.read_text().split("child ")[1].split()[0])
        assert psutil.pid_exists(child_pid)
        os.kill(parent.pid, signal.SIGKILL)
    assert_gone(child_pid)


def test_the_follower_copies_whole_lines_once(tmp_path: Path) -> None:
    lines: list[str] = []
    follower = LogFollower(lines.append)
    with Supervisor(tmp_path, 5) as supervisor:
        supervisor.tick = lambda: follower.poll(supervisor.services)
        supervisor.wait_ready([supervisor.start(spec("one"))], READY_S)
    assert lines == ["[one] starting good", "[one] stopping"]
