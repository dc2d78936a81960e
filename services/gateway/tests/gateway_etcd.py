"""A real etcd on this machine: start, kill, freeze, start again with or without its data."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

MISSING = "etcd is not installed, and these tests need a real one: apt-get install etcd-server (Debian), or put etcd 3.4 or newer on the PATH"


def etcd_binary() -> str:
    """Where it is. Without it a test fails rather than passing unseen."""
    found = shutil.which("etcd")
    if found is None:
        pytest.fail(MISSING)
    return found


class EtcdServer:
    """One member that is a cluster by itself. `flags`: more of etcd's own."""

    def __init__(self, folder: Path, *flags: str, scheme: str = "http") -> None:
        self._binary = etcd_binary()
        self._folder = folder
        self._flags = flags
        self._scheme = scheme
        self._port, self._peer_port, self._metrics_port = _free_port(), _free_port(), _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://{self.address}"

    def start(self) -> EtcdServer:
        """Returns when it has a leader and answers."""
        client, peer = self.endpoint, f"http://127.0.0.1:{self._peer_port}"
        command = [
            *(self._binary, "--name", "one", "--data-dir", str(self._folder / "data"), "--log-level", "error", "--logger", "zap"),
            *("--listen-client-urls", client, "--advertise-client-urls", client, "--listen-metrics-urls", f"http://127.0.0.1:{self._metrics_port}"),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}", *self._flags),
        ]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not self._healthy():
            assert self._process.poll() is None, (self._folder / "etcd.log").read_text()[-2000:]
            assert time.monotonic() < deadline, (self._folder / "etcd.log").read_text()[-2000:]
            time.sleep(0.05)
        return self

    def _healthy(self) -> bool:
        """Asked where it speaks plain text, also when clients need certificates."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/health", timeout=2) as answer:
                return str(json.load(answer)["health"]) == "true"
        except (urllib.error.URLError, ConnectionError, TimeoutError, ValueError):
            return False

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def wipe(self) -> None:
        """Its data, once it is dead."""
        assert self._process is None
        shutil.rmtree(self._folder / "data")

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.kill()


def _free_port() -> int:
    """Below the range from which the system numbers outgoing connections."""
    while True:
        port = 12_000 + secrets.randbelow(20_000)
        with contextlib.closing(socket.socket()) as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            return port
