"""The `baton` command with the real services and the real model: it works, and however it ends, it leaves nothing behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration

BATON = (sys.executable, "-m", "baton.cli.main")
START_S = 120
STOP_S = 40
ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--bootstrap-port", "0")


class Command:
    """A running `baton up`, and every process that was ever seen below it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen([*BATON, "up", *ANY_PORTS, "--drain-timeout-s", "5", *flags], stdout=out, stderr=err)
        self.seen: dict[str, psutil.Process] = {}

    def wait_serving(self) -> str:
        """The gateway's gRPC address."""
        deadline = time.monotonic() + START_S
        while "Ctrl-C stops" not in self.err.read_text():
            self.note_children()
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.05)
        self.note_children()
        found = re.search(r"gRPC +(\S+)", self.out.read_text())
        assert found is not None
        return found[1]

    def note_children(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            role = re.search(r"baton\.(prefill|decode|gateway)\.app", " ".join(child.cmdline()))
            if role:
                self.seen[role[1]] = child

    def wait_exit(self) -> int:
        return self.process.wait(STOP_S)

    def assert_nothing_left(self) -> None:
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=STOP_S)
        assert alive == []
        assert segments_of({process.pid for process in self.seen.values()}) == []


def segments_of(pids: set[int]) -> list[str]:
    """Shared memory that processes made and that is still there: System V by its creator, POSIX by the process id in UCX's names."""
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    left = [f"shmid {row[1]}" for row in rows if int(row[4]) in pids]
    numbers = {str(pid) for pid in pids}
    return left + [path.name for path in Path("/dev/shm").iterdir() if numbers & set(re.findall(r"\d+", path.name))]


@pytest.fixture
def command(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Command]:
    running = Command(tmp_path, *getattr(request, "param", ()))
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()
    for process in running.seen.values():
        if process.is_running():
            process.kill()


def chat(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BATON, "chat", "--address", address, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_demo_answers_shows_the_room_and_leaves_nothing(transport: str) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    run = subprocess.run([*BATON, "demo", "--transport", transport], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The capital of France is Paris." in run.stdout
    states = [line.split() for line in run.stdout.splitlines() if line.startswith(("BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS"))]
    assert [row[0] for row in states] == ["BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS"]
    assert all(float(row[2]) >= 0 for row in states)
    facts = dict(re.findall(r"^(\S(?:.*?\S)?) {2,}(\S.*?) *$", run.stdout, re.MULTILINE))
    num_prompt = int(facts["prompt tokens"])
    # Keys and values of 30 layers, 3 heads of 64, in float32, in pages of 16 tokens.
    assert int(facts["KV bytes moved"].split()[0].replace(",", "")) == -(-num_prompt // 16) * 16 * 2 * 30 * 3 * 64 * 4
    assert int(facts["puts"]) >= 60
    assert facts["transport"] in ({"sysv", "posix"} if transport == "shm" else {"tcp"})
    assert facts["digest"] == "equal on both sides"
    for name, unit in (("TTFT", "ms"), ("mean ITL", "ms"), ("total", "ms")):
        value, found_unit = facts[name].split()
        assert float(value) > 0
        assert found_unit == unit
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before


def test_up_serves_until_ctrl_c_and_chat_talks_to_it(command: Command) -> None:
    address = command.wait_serving()
    assert set(command.seen) == {"prefill", "decode", "gateway"}
    spoken = chat(address, "What is the capital of France?", "--max-tokens", "32", "--report")
    assert spoken.returncode == 0, spoken.stderr
    assert "Paris" in spoken.stdout
    assert "TRANSFERRING" in spoken.stdout
    wrong = chat(address, "hello", "--max-tokens", "100000")
    assert wrong.returncode == 1
    assert "INVALID_ARGUMENT" in wrong.stderr
    assert "100000" in wrong.stderr
    command.process.send_signal(signal.SIGINT)
    assert command.wait_exit() == 0, command.err.read_text()
    command.assert_nothing_left()


@pytest.mark.parametrize("command", [("--topology", "plain")], indirect=True)
def test_a_plain_fleet_says_that_nothing_moved(command: Command) -> None:
    spoken = chat(command.wait_serving(), "What is the capital of France?", "--max-tokens", "32", "--report")
    assert "Paris" in spoken.stdout
    assert re.search(r"KV moved +none", spoken.stdout)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait_exit() == 0, command.err.read_text()
    command.assert_nothing_left()


@pytest.mark.parametrize("victim", ["prefill", "decode", "gateway"])
def test_a_killed_service_is_named_and_ends_all(command: Command, victim: str) -> None:
    command.wait_serving()
    command.seen[victim].kill()
    assert command.wait_exit() == 1
    assert re.search(rf"baton: {victim}\S* was killed by SIGKILL while it was serving", command.err.read_text())
    command.assert_nothing_left()


def test_services_end_when_up_itself_is_killed(command: Command) -> None:
    command.wait_serving()
    command.process.kill()
    command.wait_exit()
    command.assert_nothing_left()


def test_ctrl_c_while_starting_ends_quietly(command: Command) -> None:
    while len(command.seen) < 2:
        command.note_children()
        time.sleep(0.01)
    os.kill(command.process.pid, signal.SIGINT)
    assert command.wait_exit() == 130
    assert "Traceback" not in command.err.read_text()
    command.assert_nothing_left()


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = subprocess.run([*BATON, "up", *ANY_PORTS, "--bootstrap-port", port], capture_output=True, text=True, timeout=START_S, check=False)
    assert run.returncode == 1
    assert f"127.0.0.1:{port}" in run.stderr
    assert "--bootstrap-port" in run.stderr or "in use" in run.stderr
