"""A fleet on this machine: which services a topology needs, with which flags, and bringing them up in order."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from pathlib import Path

from baton.cli.config import environment_of_services
from baton.cli.errors import UsageError
from baton.cli.fleet_ports import check_ports, scraped
from baton.cli.services import ServiceSpec, Supervisor
from baton.servicekit import Port


class Topology(StrEnum):
    SPLIT = "split"
    PLAIN = "plain"


class Transport(StrEnum):
    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"


@dataclass(frozen=True)
class FleetOptions:
    """What `baton up` was asked for. A port of 0 lets the system choose. `digest`: "off", "sample" or "all" landed rooms are compared.

    worker_flags: handed as they are to every prefill, decode and plain server; prefill_flags and decode_flags to those of that role alone.
    """

    model_path: Path
    model_name: str
    _: KW_ONLY
    topology: Topology = Topology.SPLIT
    num_prefill: int = 1
    num_decode: int = 1
    transport: Transport = Transport.AUTO
    digest: str = "off"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    bootstrap_port: int = 8998
    ready_timeout_s: float = 180.0
    worker_flags: tuple[str, ...] = ()
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, value in (("--prefill", self.num_prefill), ("--decode", self.num_decode)):
            if not 1 <= value <= 16:
                raise UsageError(f"{field} is {value}, but must be from 1 to 16")
        if not (self.model_path / "config.json").is_file():
            raise UsageError(f"--model: {self.model_path} is not a Hugging Face folder (no config.json in it)")


@dataclass(frozen=True)
class FleetAddresses:
    http: str
    grpc: str
    workers: dict[str, str]
    model: str


def prefill_spec(options: FleetOptions, index: int) -> ServiceSpec:
    # Only the first can have the well-known bootstrap port.
    port = options.bootstrap_port if index == 0 else 0
    return _worker(
        options, f"prefill-{index}", "prefill", "--bootstrap-port", str(port), "--transport", options.transport.value, *options.prefill_flags
    )


def decode_spec(options: FleetOptions, index: int) -> ServiceSpec:
    flags = ("--role", "decode", "--transport", options.transport.value, "--digest", options.digest, *options.decode_flags)
    return _worker(options, f"decode-{index}", "decode", *flags)


def plain_spec(options: FleetOptions, index: int) -> ServiceSpec:
    return _worker(options, f"plain-{index}", "decode", "--role", "plain")


def gateway_spec(options: FleetOptions, workers: dict[str, list[str]]) -> ServiceSpec:
    """`workers`: "prefill", "decode", "plain" -> their gRPC addresses."""
    listen = ("--host", options.host, "--port", str(options.grpc_port), "--http-port", str(options.http_port))
    model = ("--model-path", str(options.model_path), "--model-name", options.model_name)
    named = [flag for kind, addresses in workers.items() for flag in (f"--{kind}", ",".join(addresses))]
    return ServiceSpec("gateway", (*_module("gateway"), *listen, *model, *named))


def _worker(options: FleetOptions, name: str, service: str, *flags: str) -> ServiceSpec:
    model = ("--model-path", str(options.model_path), "--model-name", options.model_name)
    return ServiceSpec(name, (*_module(service), "--host", options.host, "--port", "0", *model, *options.worker_flags, *flags))


def _module(service: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"baton.{service}.app")


def kinds_of(options: FleetOptions) -> dict[str, int]:
    """How many workers of each kind: "prefill" and "decode", or "plain"."""
    if options.topology is Topology.SPLIT:
        return {"prefill": options.num_prefill, "decode": options.num_decode}
    return {"plain": options.num_decode}


def ports_of(options: FleetOptions, environ: Mapping[str, str]) -> list[Port]:
    """Every port that this fleet is to listen on. `environ`: what its services will have."""
    host = options.host
    ports = [Port("--http-port", host, options.http_port), Port("--grpc-port", host, options.grpc_port)]
    if options.topology is Topology.SPLIT:
        ports.append(Port("--bootstrap-port", host, options.bootstrap_port))
    ports += scraped("gateway", ["gateway"], host, (), environ)
    own_flags = {"prefill": options.prefill_flags, "decode": options.decode_flags, "plain": ()}
    for kind, count in kinds_of(options).items():
        names, flags = [f"{kind}-{index}" for index in range(count)], (*options.worker_flags, *own_flags[kind])
        ports += scraped("prefill" if kind == "prefill" else "decode", names, host, flags, environ)
    return ports


def start_fleet(options: FleetOptions, supervisor: Supervisor, note: Callable[[str], None]) -> FleetAddresses:
    """Starts the workers, then the gateway that is told where they are; returns when all of them serve.

    Raises UsageError for a port that is taken or asked for twice, ServiceStartError, StopAskedError.
    """
    check_ports(ports_of(options, environment_of_services()))
    make = {"prefill": prefill_spec, "decode": decode_spec, "plain": plain_spec}
    started = {kind: [supervisor.start(make[kind](options, index)) for index in range(count)] for kind, count in kinds_of(options).items()}
    workers = [service for services in started.values() for service in services]
    note(f"starting {', '.join(service.name for service in workers)}")
    records = supervisor.wait_ready(workers, options.ready_timeout_s)
    addresses = {kind: [records[service.name].addresses["grpc"] for service in services] for kind, services in started.items()}
    note("starting gateway")
    gateway = supervisor.start(gateway_spec(options, addresses))
    front = supervisor.wait_ready([gateway], options.ready_timeout_s)["gateway"].addresses
    return FleetAddresses(
        http=front["http"],
        grpc=front["grpc"],
        workers={name: record.addresses["grpc"] for name, record in records.items()},
        model=options.model_name,
    )
