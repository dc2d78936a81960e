"""Real processes: what a launcher sees."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = """
import asyncio, gc, sys, time
from pathlib import Path
from baton.servicekit import ListenSettings, LogSettings, SecretFileError, configure_logs, run

mode, ready_file, parent_pid = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
listen = ListenSettings(ready_file=ready_file, parent_pid=parent_pid or None, drain_timeout_s=0.0 if mode == "hang" else 30.0)
configure_logs(LogSettings(), service="probe", instance_id="probe-1")

async def main(life):
    if mode == "raise":
        raise OSError("no disk")
    if mode == "bad file":
        raise SecretFileError("--key-file='keys': there is no key in it")
    if mode == "folder gone":
        ready_file.parent.rmdir()
    if mode == "loading":
        print("loading", flush=True)
        await asyncio.to_thread(time.sleep, 60)
    life.ready({"grpc": "127.0.0.1:1"})
    if mode == "fail":
        life.fail(RuntimeError("engine died"))
    if mode == "watched":
        async def clock():
            raise RuntimeError("clock stopped")
        life.watch(asyncio.create_task(clock()))
    if mode == "garbage":
        print(len(gc.get_objects()) < 1000 < gc.get_freeze_count(), gc.get_threshold()[0], flush=True)
    await life.stopped()
    if mode == "slow-drain":
        print("draining", flush=True)
        await asyncio.sleep(60)
    print("drained", flush=True)

sys.exit(run(main, service="probe", instance_id="probe-1", listen=listen))
"""

#: Starts the service as its child, says its pid, and waits to be killed.
LAUNCHER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "normal", sys.argv[2], str(os.getpid())])
print(child.pid, flush=True)
time.sleep(60)
"""


class Probe:
    def __init__(self, mode: str, folder: Path, parent_pid: int = 0) -> None:
        self.ready_file = folder / "ready.json"
        command = [sys.executable, "-c", SERVICE, mode, str(self.ready_file), str(parent_pid)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_ready(self) -> dict[str, object]:
        wait_until(self.ready_file.exists)
        loaded: dict[str, object] = json.loads(self.ready_file.read_text())
        return loaded

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def probes() -> Iterator[list[Probe]]:
    started: list[Probe] = []
    yield started
    for probe in started:
        if probe.process.poll() is None:
            probe.process.kill()
            probe.process.communicate()


def wait_until(condition, timeout_s: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def start(probes: list[Probe], mode: str, folder: Path, parent_pid: int = 0) -> Probe:
    probe = Probe(mode, folder, parent_pid)
    probes.append(probe)
    return probe


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_file_then_a_clean_stop(probes: list[Probe], tmp_path: Path, number: signal.Signals) -> None:
    probe = start(probes, "normal", tmp_path)
    record = probe.wait_ready()
    assert record == {"service": "probe", "instance_id": "probe-1", "pid": probe.process.pid, "addresses": {"grpc": "127.0.0.1:1"}}
    probe.process.send_signal(number)
    status, out, _ = probe.end()
    assert (status, out) == (0, "drained\n")
    assert not probe.ready_file.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_service_is_made_of_is_not_looked_through_for_garbage(probes: list[Probe], tmp_path: Path) -> None:
    probe = start(probes, "garbage", tmp_path)
    probe.wait_ready()
    probe.process.send_signal(signal.SIGTERM)
    assert probe.end()[:2] == (0, "True 10000\ndrained\n")


def test_a_second_signal_cuts_the_drain_short(probes: list[Probe], tmp_path: Path) -> None:
    probe = start(probes, "slow-drain", tmp_path)
    probe.wait_ready()
    probe.process.send_signal(signal.SIGTERM)
    assert probe.process.stdout is not None
    assert probe.process.stdout.readline() == "draining\n"
    probe.process.send_signal(signal.SIGTERM)
    assert probe.end()[0] == 143


@pytest.mark.parametrize(("mode", "said"), [("raise", "no disk"), ("fail", "engine died"), ("watched", "clock stopped")])
def test_a_failure_exits_with_one_and_is_logged(probes: list[Probe], tmp_path: Path, mode: str, said: str) -> None:
    probe = start(probes, mode, tmp_path)
    status, _, err = probe.end()
    assert status == 1
    assert said in err
    assert not probe.ready_file.exists()


def test_a_file_that_settings_name_and_that_cannot_be_used_exits_with_two(probes: list[Probe], tmp_path: Path) -> None:
    status, _, err = start(probes, "bad file", tmp_path).end()
    assert (status, err) == (2, "baton-probe: --key-file='keys': there is no key in it\n")


def test_a_ready_file_that_cannot_be_written_any_more_is_told_in_one_line(probes: list[Probe], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    status, _, err = start(probes, "folder gone", folder).end()
    assert status == 1
    assert f"baton-probe: --ready-file='{folder / 'ready.json'}' could be written when this service started and cannot be now: No such file" in err
    assert "Traceback" not in err


def test_a_killed_launcher_takes_the_service_with_it(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, SERVICE, str(ready_file)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    wait_until(ready_file.exists)
    launcher.kill()
    launcher.wait()
    try:
        wait_until(lambda: not alive(child), 10.0)
        assert not ready_file.exists(), "it was killed instead of drained"
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)
        launcher.stdout.close()


def test_a_parent_that_is_already_gone(probes: list[Probe], tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    probe = start(probes, "normal", tmp_path, parent_pid=gone.pid)
    assert probe.end()[0] == 0


def test_a_signal_while_it_loads_ends_it_at_once(probes: list[Probe], tmp_path: Path) -> None:
    probe = Probe("loading", tmp_path)
    probes.append(probe)
    assert probe.process.stdout is not None
    assert probe.process.stdout.readline() == "loading\n"
    probe.process.send_signal(signal.SIGTERM)
    code, _, err = probe.end()
    assert code == 0
    assert "stopped before it was ready" in err
    assert not probe.ready_file.exists()


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), flags=re.S)
    assert code is not None
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-c", code[1], "--port", "0", "--ready-file", str(ready), "--greeting", "good day"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_until(lambda: ready.exists() or process.poll() is not None)
            assert process.poll() is None, process.stdout and process.stdout.read()
            with grpc.insecure_channel(json.loads(ready.read_text())["addresses"]["grpc"]) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert "good day" in output
