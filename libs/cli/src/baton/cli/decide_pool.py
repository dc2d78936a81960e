"""The servers that `baton decide` compares: per device at most one of each role, and a gateway for each topology over those that it uses.

All of them stay up for the whole run, so that topologies can be measured in turns; a server without requests sleeps."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from baton.bench.decide.record import Server, Topology
from baton.cli.errors import UsageError
from baton.cli.fleet import FleetOptions, decode_spec, gateway_spec, plain_spec, prefill_spec
from baton.cli.services import ServiceSpec, Supervisor
from baton.cli.services.pinned import pinned

DEVICE = re.compile(r"cpu:(?P<first>\d+)(-(?P<last>\d+))?|cuda:(?P<gpu>\d+)")
#: Part of a GPU's memory that all servers on it together may fill.
MEMORY_FRACTION = 0.9
SPECS = {"prefill": prefill_spec, "decode": decode_spec, "plain": plain_spec}


@dataclass(frozen=True)
class Device:
    """`cores`: of a CPU device, the cores that its server is pinned to; empty for a GPU."""

    name: str
    cores: tuple[int, ...]

    @property
    def is_gpu(self) -> bool:
        return not self.cores

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--device", self.name) if self.is_gpu else ("--device", "cpu", "--threads", str(len(self.cores)))


def parse_devices(text: str) -> tuple[Device, ...]:
    """`cpu:0,cpu:1` or `cpu:0-3,cpu:4-7` (cores) or `cuda:0,cuda:1`; one named twice is shared. Raises UsageError."""
    return tuple(_device(name.strip()) for name in text.split(","))


def _device(name: str) -> Device:
    found = DEVICE.fullmatch(name)
    if found is None:
        raise UsageError(f"--devices: {name!r} is no device; write cpu:CORE, cpu:FIRST-LAST or cuda:NUMBER, separated by commas")
    if found["gpu"] is not None:
        return Device(name, ())
    first = int(found["first"])
    cores = tuple(range(first, int(found["last"] or first) + 1))
    if not cores:
        raise UsageError(f"--devices: {name!r} ends before it begins")
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if missing := sorted(set(cores) - ours):
        raise UsageError(
            f"--devices: {name!r} has core {missing[0]}, but this process may use only {', '.join(map(str, sorted(ours))) or 'none by number'}"
        )
    return Device(name, cores)


def is_shared(devices: Sequence[Device]) -> bool:
    """Whether two of them have hardware in common."""
    used = Counter(core for device in devices for core in (device.cores or (device.name,)))
    return any(num > 1 for num in used.values())


def topologies_of(num_devices: int, splits: Sequence[tuple[int, int]] | None) -> tuple[Topology, ...]:
    """One server, copies on all devices, and every split of them or those asked for. Raises UsageError."""
    if not 2 <= num_devices <= 16:
        raise UsageError(f"--devices names {num_devices}, but must name from 2 to 16 (the same twice is shared)")
    chosen = [(num_prefill, num_devices - num_prefill) for num_prefill in range(1, num_devices)] if splits is None else splits
    for num_prefill, num_decode in chosen:
        if num_prefill < 1 or num_decode < 1 or num_prefill + num_decode != num_devices:
            raise UsageError(f"--splits: {num_prefill}:{num_decode} does not share {num_devices} devices out among prefill and decode servers")
    plain = tuple(f"plain-{place}" for place in range(num_devices))
    found = [Topology("one", "one", 1, 0, 0, plain[:1]), Topology("copies", "copies", num_devices, 0, 0, plain)]
    for num_prefill, num_decode in chosen:
        prefill = [f"prefill-{place}" for place in range(num_prefill)]
        decode = [f"decode-{place}" for place in range(num_prefill, num_devices)]
        found.append(Topology(f"split-{num_prefill}-{num_decode}", "split", 0, num_prefill, num_decode, (*prefill, *decode)))
    return tuple(found)


def parse_splits(text: str | None) -> list[tuple[int, int]] | None:
    """`1:3,2:2`. Raises UsageError."""
    if text is None:
        return None
    pairs = [re.fullmatch(r"\s*(\d+):(\d+)\s*", part) for part in text.split(",")]
    if not all(pairs):
        raise UsageError(f"--splits is {text!r}, but must be PREFILL:DECODE pairs, separated by commas")
    return [(int(pair[1]), int(pair[2])) for pair in pairs if pair]


class Pool:
    """Starts servers and gateways under `supervisor`, which ends them. `plain_flags`: for plain servers alone."""

    def __init__(self, options: FleetOptions, devices: Sequence[Device], topologies: Sequence[Topology], supervisor: Supervisor) -> None:
        self._options, self._devices, self._topologies, self._supervisor = options, devices, topologies, supervisor
        self._addresses: dict[str, str] = {}
        self._on_gpu = Counter(devices[_place(name)].name for name in self._needed(topologies) if devices[_place(name)].is_gpu)
        self._started_on = Counter[str]()
        self.servers: list[Server] = []

    def start(self, kinds: Iterable[str], flags: Sequence[str], note: Callable[[str], None]) -> dict[str, str]:
        """Servers and gateways of the topologies of these kinds; topology -> the gateway's gRPC address.

        Raises ServiceStartError, StopAskedError."""
        mine = [topology for topology in self._topologies if topology.kind in set(kinds)]
        waiting = [name for name in self._needed(mine) if name not in self._addresses]
        while waiting:
            batch = self._batch(waiting)
            note(f"starting {', '.join(batch)}")
            services = [self._supervisor.start(self._spec(name, flags)) for name in batch]
            records = self._supervisor.wait_ready(services, self._options.ready_timeout_s)
            self._addresses |= {name: records[name].addresses["grpc"] for name in batch}
            waiting = [name for name in waiting if name not in batch]
        note(f"starting gateways of {', '.join(topology.name for topology in mine)}")
        gateways = {topology.name: self._supervisor.start(self._gateway(topology)) for topology in mine}
        fronts = self._supervisor.wait_ready(gateways.values(), self._options.ready_timeout_s)
        return {name: fronts[service.name].addresses["grpc"] for name, service in gateways.items()}

    def _batch(self, waiting: Sequence[str]) -> list[str]:
        """Servers that may start at once: on one GPU one after the other, since each looks at what is free."""
        seen, batch = set[str](), []
        for name in waiting:
            device = self._devices[_place(name)]
            if not device.is_gpu or device.name not in seen:
                seen.add(device.name)
                batch.append(name)
        return batch

    def _spec(self, name: str, flags: Sequence[str]) -> ServiceSpec:
        role, place = name.rsplit("-", 1)
        device = self._devices[int(place)]
        own = (*device.flags, *self._memory_flags(device), *self._options.worker_flags, *flags)
        spec = SPECS[role](replace(self._options, worker_flags=own), int(place))
        if device.cores:
            spec = ServiceSpec(spec.name, pinned(spec.command, device.cores), spec.environment)
        self.servers.append(Server(name, role, device.name, spec.command))
        return spec

    def _memory_flags(self, device: Device) -> tuple[str, ...]:
        """`--memory-fraction` counts what servers before it took: the n-th of N may fill n/N."""
        if not device.is_gpu:
            return ()
        self._started_on[device.name] += 1
        return ("--memory-fraction", f"{MEMORY_FRACTION * self._started_on[device.name] / self._on_gpu[device.name]:.3f}")

    def _gateway(self, topology: Topology) -> ServiceSpec:
        kinds: dict[str, list[str]] = {}
        for name in topology.servers:
            kinds.setdefault(name.rsplit("-", 1)[0], []).append(self._addresses[name])
        return replace(gateway_spec(self._options, kinds), name=f"gateway-{topology.name}")

    @staticmethod
    def _needed(topologies: Iterable[Topology]) -> list[str]:
        return list(dict.fromkeys(name for topology in topologies for name in topology.servers))


def _place(server: str) -> int:
    return int(server.rsplit("-", 1)[1])
