"""UCX's own benchmark program, from the same wheel as the library."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from baton.kvtransfer.bench.cases import WARM_PUTS, Case
from baton.kvtransfer.ucx.library import wheel_library

#: Shared memory: both ways that it has there are tried; the one with the better median counts, not the better of each turn.
_TLS = {"shm": ("sysv", "sysv,cma"), "tcp": ("tcp",)}
_TLS_CUDA = "sm,cuda"
_TIMEOUT_S = 120
_MAX_PORTS = 5


class _PortTakenError(Exception):
    """Nobody came to listen on this port."""


def program() -> Path | None:
    library = wheel_library()
    path = library.parent.parent / "bin" / "ucx_perftest" if library else None
    return path if path and path.is_file() else None


def ways(transport: str) -> tuple[str, ...]:
    """Values of UCX_TLS with which the program may be run over this transport, host memory on both sides."""
    return _TLS[transport]


def gigabytes_per_s_between_devices(executable: Path, case: Case) -> float:
    return gigabytes_per_s(executable, case, _TLS_CUDA, "cuda")


def gigabytes_per_s(executable: Path, case: Case, tls: str, memory: str = "host") -> float:
    """memory: "host" or "cuda", on both sides. Raises TimeoutError when its server does not listen, whichever port it is given."""
    for _ in range(_MAX_PORTS):
        # Ports are those that connections of other programs get, too: one that was free may be taken by now.
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with suppress(_PortTakenError):
            return _run(executable, case, tls, memory, port)
    raise TimeoutError(f"ucx_perftest did not listen on any of {_MAX_PORTS} ports")


def _run(executable: Path, case: Case, tls: str, memory: str, port: int) -> float:
    library_folder = str(executable.parent.parent / "lib")
    environment = {**os.environ, "LD_LIBRARY_PATH": library_folder, "UCX_TLS": tls, "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = [
        str(executable),
        "-p",
        str(port),
        "-t",
        "ucp_put_bw",
        "-s",
        str(case.num_bytes),
        "-n",
        str(case.count),
        "-w",
        str(WARM_PUTS),
        "-m",
        memory,
        "-f",
    ]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(port, server)
            client = subprocess.run([*command, "-v", "127.0.0.1"], env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
            server.wait(_TIMEOUT_S)
        finally:
            server.kill()
    # iterations, typical, average, overall latency, average and overall bandwidth (MiB/s), message rates
    return float(client.stdout.strip().splitlines()[-1].split(",")[5]) * (1 << 20) / 1e9


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Until somebody listens; without connecting, which the program would take for its client."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and server.poll() is None:
        for row in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
            if row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A":
                return
        time.sleep(0.01)
    raise _PortTakenError(port)
