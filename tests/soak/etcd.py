"""A real etcd of one member, which can be stopped and started again on its data."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path

from fleet import free_port, wait_for


def installed() -> bool:
    """Whether there is an etcd to start (Debian: etcd-server)."""
    return shutil.which("etcd") is not None


class Etcd:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._peer = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> Etcd:
        client = f"http://{self.endpoint}"
        flags = {
            "data-dir": str(self._folder / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": self._peer,
            "initial-advertise-peer-urls": self._peer,
            "initial-cluster": f"default={self._peer}",
        }
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["etcd", *(f"--{name}={value}" for name, value in flags.items())], stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        wait_for(self._listens, 30, "etcd listens")
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None

    def _listens(self) -> bool:
        host, port = self.endpoint.split(":")
        with socket.socket() as one:
            return one.connect_ex((host, int(port))) == 0
