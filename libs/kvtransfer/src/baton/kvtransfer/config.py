"""Settings of an agent. The one place of this package that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.kvtransfer.checks import whole
from baton.kvtransfer.errors import InvalidArgument

#: Path of a libucp.so.0 to use instead of the system's or the wheel's.
LIBRARY_VARIABLE = "BATON_UCX_LIBRARY"

BACKENDS = ("ucx", "loopback")
TRANSPORTS = ("auto", "shm", "tcp")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """instance_id: of this process, new at every start; peers know it by that.

    backend: "ucx", or "loopback" (the shipped fake: one process, no UCX).
    transport: "shm": shared memory (or CUDA IPC) on one host, true one-sided stores. "tcp". "auto": shared memory where the other process shares
        host, pid and ipc namespace, else the best network that UCX finds.
    expected_transport: what `Peer.transport` must contain (e.g. "sysv", "rc", "cuda_ipc"), else connecting raises UnexpectedTransport. "": anything.
    fingerprint: what both sides must agree on (model, dtype, page size, layout, ...); compared entry by entry when connecting.
    transfer_queues: native progress threads for sending; a peer is pinned to one.
    spin_us: how long an idle progress thread polls before it sleeps.
    max_in_flight: puts that one peer may have outstanding in UCX; the rest waits, so that a cancel is prompt and peers share a queue fairly.
    max_put_bytes: longer spans are posted in pieces of this size.
    connect_timeout_s, probe_timeout_s: what a caller of `connect` and `probe` may wait.
    probe_bytes: the largest put of a probe; the receiver keeps as much scratch memory (untouched until somebody probes). 0: no probing.
    device: "" for host memory, or the number of the CUDA device whose memory is registered.
    ucx_library: path of a libucp.so.0 (default: BATON_UCX_LIBRARY, else the system's, else the wheel's).
    ucx_options: further settings of UCX without the UCX_ prefix, e.g. {"NET_DEVICES": "mlx5_0:1"}; they win over ours, and ours over the
        environment's (a warning names what of it is not used).
    """

    instance_id: str
    backend: str = "ucx"
    transport: str = "auto"
    expected_transport: str = ""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    transfer_queues: int = 4
    spin_us: int = 20
    max_in_flight: int = 64
    max_put_bytes: int = 16 << 20
    connect_timeout_s: float = 10.0
    probe_timeout_s: float = 10.0
    probe_bytes: int = 64 << 20
    device: str = ""
    ucx_library: str = field(default_factory=lambda: os.environ.get(LIBRARY_VARIABLE, ""))
    ucx_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("instance_id", "backend", "transport", "expected_transport", "device", "ucx_library"):
            _text(name, getattr(self, name))
        for name, pairs in (("fingerprint", self.fingerprint), ("ucx_options", self.ucx_options)):
            if not isinstance(pairs, Mapping):
                raise InvalidArgument(f"{name}={pairs!r} is a {type(pairs).__name__}, must be a mapping of strings")
            for key, value in pairs.items():
                _text(f"a name of {name}", key)
                _text(f"{name}[{key!r}]", value)
        if not 1 <= len(self.instance_id) <= 128:
            raise InvalidArgument(f"instance_id={self.instance_id!r} has {len(self.instance_id)} characters, must have 1 to 128")
        _one_of("backend", self.backend, BACKENDS)
        _one_of("transport", self.transport, TRANSPORTS)
        whole("transfer_queues", self.transfer_queues, 1, 64)
        whole("spin_us", self.spin_us, 0, 100_000)
        whole("max_in_flight", self.max_in_flight, 1, 65_536)
        whole("max_put_bytes", self.max_put_bytes, 4096, 1 << 40)
        _between("connect_timeout_s", self.connect_timeout_s, 0.001, 3600)
        _between("probe_timeout_s", self.probe_timeout_s, 0.001, 3600)
        whole("probe_bytes", self.probe_bytes, 0, 1 << 34)
        if self.device and not (self.device.isascii() and self.device.isdecimal()):
            raise InvalidArgument(f"device={self.device!r} must be empty (host memory) or the number of a CUDA device")


def net_devices(config: AgentConfig) -> str:
    """UCX's choice of network devices, as the user made it; "": all."""
    return config.ucx_options.get("NET_DEVICES", os.environ.get("UCX_NET_DEVICES", ""))


def overruled(ours: Mapping[str, str], config: AgentConfig) -> list[str]:
    """Variables of the environment that say something else than what UCX is told here (`ours`), and that nobody repeated in `ucx_options`."""
    given = {name: os.environ.get(f"UCX_{name}", value) for name, value in ours.items()}
    return [f"UCX_{name}={given[name]}" for name, value in ours.items() if given[name] != value and name not in config.ucx_options]


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name}={value!r} is a {type(value).__name__}, must be a string")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidArgument(f"{name}={value!r} must be one of {', '.join(allowed)}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name}={value} is outside [{low}, {high}]")
