"""A fleet on this machine: which services a topology needs, with which flags, and bringing them up in order."""

import socket
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from pathlib import Path

from baton.cli.errors import UsageError
from baton.cli.services import ServiceSpec, Supervisor


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


def check_ports(options: FleetOptions) -> None:
    """Says at once what a service would say only after it has loaded the model. Raises UsageError."""
    ports = {"--http-port": options.http_port, "--grpc-port": options.grpc_port}
    if options.topology is Topology.SPLIT:
        ports["--bootstrap-port"] = options.bootstrap_port
    for flag, port in ports.items():
        try:
            socket.create_server((options.host, port), family=socket.AF_INET6 if ":" in options.host else socket.AF_INET).close()
        except OSError as error:
            raise UsageError(f"{flag}={port}: cannot listen on {options.host}:{port}: {error.strerror or error}; choose another, or 0") from error


def start_fleet(options: FleetOptions, supervisor: Supervisor, note: Callable[[str], None]) -> FleetAddresses:
    """Starts the workers, then the gateway that is told where they are; returns when all of them serve.

    Raises UsageError for a port that is taken, ServiceStartError, StopAskedError.
    """
    check_ports(options)
    kinds = {"prefill": options.num_prefill, "decode": options.num_decode} if options.topology is Topology.SPLIT else {"plain": options.num_decode}
    make = {"prefill": prefill_spec, "decode": decode_spec, "plain": plain_spec}
    started = {kind: [supervisor.start(make[kind](options, index)) for index in range(count)] for kind, count in kinds.items()}
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
