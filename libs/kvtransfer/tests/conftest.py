"""Pairs of agents: in one process over the loopback backend, in two processes over UCX."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = Path(__file__).with_name("remote_agent.py")


def _beside(name: str) -> Any:
    """A module of this folder."""
    spec = spec_from_file_location(f"kvtransfer_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RemoteAgent = _beside("remote_agent").RemoteAgent
two_hosts = _beside("two_hosts")


class RemoteError(Exception):
    """What an agent of another process raised; `kind` is the name of its type."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class RemoteProcess:
    """The methods of RemoteAgent, called in another process."""

    def __init__(self, *, prefix: tuple[str, ...] = (), **arguments: Any) -> None:
        """prefix: in front of the command."""
        self._pipe, theirs = Pipe()
        self.process = subprocess.Popen([*prefix, sys.executable, str(_SCRIPT), str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe.send(("open", arguments))
        self._result()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            return self._result()

        return call

    def _result(self) -> Any:
        good, result = self._pipe.recv()
        if not good:
            raise RemoteError(*result)
        return result

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self._pipe.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


class House:
    """Makes agents for one test, and ends them."""

    def __init__(self, backend: str, transport: str) -> None:
        self.backend = backend
        self.transport = transport
        self._made: list[Any] = []

    @property
    def is_shared(self) -> bool:
        return self.transport == "shm"

    def config(self, instance_id: str, **more: Any) -> dict[str, Any]:
        return {
            "instance_id": f"{instance_id}-{uuid.uuid4().hex[:8]}",
            "backend": self.backend,
            "transport": self.transport if self.backend == "ucx" else "auto",
            "probe_bytes": 1 << 20,
            **more,
        }

    def local(self, instance_id: str = "sender", num_bytes: int = 1 << 20, **more: Any) -> Any:
        """An agent in this process."""
        agent = RemoteAgent(num_bytes=num_bytes, **self.config(instance_id, **more))
        self._made.append(agent)
        return agent

    def remote(self, instance_id: str = "receiver", num_bytes: int = 1 << 20, **more: Any) -> Any:
        """An agent in another process, where the backend has such."""
        if self.backend == "loopback":
            return self.local(instance_id, num_bytes, **more)
        process = RemoteProcess(num_bytes=num_bytes, **self.config(instance_id, **more))
        self._made.append(process)
        return process

    def end(self) -> None:
        for made in reversed(self._made):
            made.end() if isinstance(made, RemoteProcess) else made.close()


class Hosts(House):
    """Agents on two hosts (two_hosts.py), `wire` between them."""

    def __init__(self, wire: Any) -> None:
        super().__init__("ucx", "tcp")
        self.wire = wire

    def on(self, host: str, num_bytes: int = 1 << 20, *, prefix: tuple[str, ...] = (), **more: Any) -> Any:
        """prefix: in front of its command."""
        process = RemoteProcess(prefix=(*self.wire.command(host), *prefix), num_bytes=num_bytes, **{**self.config(host), **more})
        self._made.append(process)
        return process


def _house(name: str) -> Iterator[House]:
    backend, _, transport = name.partition("-")
    house = House(backend, transport)
    yield house
    house.end()


@pytest.fixture(params=["loopback", "ucx-shm", "ucx-tcp"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    yield from _house(request.param)


@pytest.fixture(params=["ucx-shm", "ucx-tcp"])
def ucx(request: pytest.FixtureRequest) -> Iterator[House]:
    yield from _house(request.param)


@pytest.fixture
def shm() -> Iterator[House]:
    yield from _house("ucx-shm")


@pytest.fixture
def tcp() -> Iterator[House]:
    yield from _house("ucx-tcp")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := two_hosts.why_not():
        pytest.skip(f"two hosts on this machine: {reason}")
    with two_hosts.TwoHosts() as wire:
        hosts = Hosts(wire)
        yield hosts
        hosts.end()


@pytest.fixture
def shared_memory_is_clean() -> Iterator[None]:
    """No segment stays that nobody is attached to. Other programs of this machine come and go meanwhile: what is theirs goes by itself."""

    def orphans() -> set[str]:
        rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text(encoding="ascii").splitlines()[1:]]
        return {name for name in os.listdir("/dev/shm") if "ucx" in name} | {row[1] for row in rows if row[6] == "0"}

    before = orphans()
    yield
    left = orphans() - before
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= orphans()
    assert not left
