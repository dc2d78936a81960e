"""10,000 rooms over two senders and two receivers: cancels, duplicate, late and forged words, processes killed and suspended.

The receivers check as they go (torture_process.py): every delivered room's digest when it lands and when it is released, a guard pattern
on every free page, free = all at the end.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("torture_process.py")
NUM_ROOMS = int(os.environ.get("BATON_TORTURE_ROOMS", "10000"))


class Actor:
    def __init__(self, role: str, transport: str, seed: int, paths: list[str]) -> None:
        self.role = role
        self.paths = paths
        self.pipe, theirs = Pipe()
        command = [sys.executable, str(SCRIPT), role, str(theirs.fileno()), transport, str(seed), *paths]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.counts: Counter[str] = Counter()
        self.is_final = False

    def read(self) -> None:
        """Takes its reports. An actor that ended by itself broke a rule."""
        try:
            while self.pipe.poll():
                self.is_final, counts = self.pipe.recv()
                self.counts = Counter(counts)
        except (EOFError, OSError):
            pass
        assert self.is_final or self.process.poll() is None, f"{self.role} ended with {self.process.returncode}; its traceback is above"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class Stage:
    """The actors, and what is done to them."""

    def __init__(self, folder: Path, transport: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.transport = transport
        self.folder = folder
        self.paths = [str(folder / f"r{number}") for number in range(2)]
        self.receivers = [self.start("receiver", [path]) for path in self.paths]
        while not all(os.path.exists(path) for path in self.paths):
            time.sleep(0.01)
        self.senders = [self.start("sender", self.paths) for _ in range(2)]
        self.past: Counter[str] = Counter()
        self.done: Counter[str] = Counter()

    def start(self, role: str, paths: list[str]) -> Actor:
        return Actor(role, self.transport, self.random.randrange(1 << 30), paths)

    def counts(self) -> Counter[str]:
        total = Counter(self.past)
        for receiver in self.receivers:
            receiver.read()
            total += receiver.counts
        for sender in self.senders:
            sender.read()
        return total

    def kill_sender(self) -> None:
        index = self.random.randrange(2)
        self.senders[index].kill()
        self.senders[index] = self.start("sender", self.paths)

    def kill_receiver(self) -> None:
        index = self.random.randrange(2)
        old = self.receivers[index]
        old.read()
        self.past += old.counts
        old.kill()
        Path(old.paths[0]).unlink(missing_ok=True)
        self.receivers[index] = self.start("receiver", old.paths)

    def suspend_sender(self) -> None:
        """Long enough for its rooms to be revoked, overdue and quarantined."""
        process = self.random.choice(self.senders).process
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.9)
        process.send_signal(signal.SIGCONT)

    def harass(self) -> None:
        act = self.random.choice([self.kill_sender, self.kill_receiver, self.suspend_sender])
        act()
        self.done[act.__name__] += 1

    def drain(self, timeout_s: float) -> Counter[str]:
        for receiver in self.receivers:
            receiver.pipe.send("drain")
        deadline = time.monotonic() + timeout_s
        while not all(receiver.is_final for receiver in self.receivers):
            self.counts()
            assert time.monotonic() < deadline, f"rooms are still open: {[receiver.counts for receiver in self.receivers]}"
            time.sleep(0.02)
        return self.counts()

    def end(self) -> None:
        for actor in [*self.senders, *self.receivers]:
            actor.process.send_signal(signal.SIGCONT)
            actor.kill()


@pytest.fixture(params=["shm", "tcp"])
def stage(request: pytest.FixtureRequest, tmp_path: Path, shared_memory_is_clean: None) -> Iterator[Stage]:
    stage = Stage(tmp_path, request.param, seed=20)
    yield stage
    stage.end()


def test_ten_thousand_rooms(stage: Stage) -> None:
    while stage.counts()["ended"] < min(100, NUM_ROOMS):
        time.sleep(0.02)
    next_act = time.monotonic()
    deadline = time.monotonic() + 200
    while (ended := stage.counts()["ended"]) < NUM_ROOMS or len(stage.done) < 3:
        assert time.monotonic() < deadline, f"only {ended} rooms ended: {stage.counts()}"
        time.sleep(0.02)
        if time.monotonic() > next_act:
            stage.harass()
            next_act = time.monotonic() + stage.random.uniform(0.3, 1.2)
    counts = stage.drain(timeout_s=30)
    print(dict(counts), dict(stage.done))
    assert counts["ended"] >= NUM_ROOMS
    assert counts["delivered"] > 0.5 * counts["ended"]
    assert counts["aborted"] > 0.02 * counts["ended"]
    assert min(counts["forged"], counts["declined"], counts["fenced"], counts["quiesced"]) > 0
    assert counts["invalid"] == 0
    assert counts["max_quarantined"] > 0
    if stage.transport == "shm":
        assert counts["fence_refused"] > 0  # a suspended or living writer is no proof
