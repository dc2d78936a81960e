"""`baton up`: a fleet on this machine, until Ctrl-C."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.config import CliConfig
from baton.cli.errors import ServiceError
from baton.cli.fleet import FleetAddresses, FleetOptions, Topology, Transport, start_fleet
from baton.cli.model import CATALOGUE
from baton.cli.model_commands import fetched
from baton.cli.services import LogFollower, Supervisor
from baton.cli.signals import stop_events

RUNS_KEPT = 10

ModelOption = Annotated[str, typer.Option(help="A name that `baton model list` shows (fetched if need be), or a Hugging Face folder.")]
TransportOption = Annotated[Transport, typer.Option(help="How KV pages move from prefill to decode.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show what the services log.")]


@dataclass(frozen=True)
class RunningFleet:
    supervisor: Supervisor
    addresses: FleetAddresses


def up(
    model: ModelOption = "smollm2",
    topology: Annotated[Topology, typer.Option(help="split: prefill and decode servers; plain: servers that do both.")] = Topology.SPLIT,
    prefill: Annotated[int, typer.Option(help="How many prefill servers (split).")] = 1,
    decode: Annotated[int, typer.Option(help="How many decode servers, or plain ones.")] = 1,
    transport: TransportOption = Transport.AUTO,
    host: Annotated[str, typer.Option(help="Address that all services listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="The gateway's HTTP port; 0 lets the system choose.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="The gateway's gRPC port; 0 lets the system choose.", min=0, max=65535)] = 8001,
    bootstrap_port: Annotated[
        int, typer.Option(help="The first prefill server's bootstrap port; 0 lets the system choose.", min=0, max=65535)
    ] = 8998,
    worker_flag: Annotated[
        list[str] | None, typer.Option(help="Handed to every prefill, decode and plain server, again and again: --worker-flag=--device=cuda:0")
    ] = None,
    drain_timeout_s: Annotated[float, typer.Option(help="Seconds that running requests get to end when all is stopped.", min=0)] = 30.0,
    verbose: VerboseOption = False,
) -> None:
    """Starts gateway, prefill and decode as processes of their own, prints where they listen, and stops them all on Ctrl-C."""
    model_path, model_name = resolve_model(model)
    options = FleetOptions(
        model_path,
        model_name,
        topology=topology,
        num_prefill=prefill,
        num_decode=decode,
        transport=transport,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        bootstrap_port=bootstrap_port,
        worker_flags=tuple(worker_flag or ()),
    )
    console = Console(stderr=True)
    with running_fleet(options, drain_timeout_s, console, verbose) as fleet:
        print_addresses(Console(), fleet)
        console.print("Ctrl-C stops all of them", highlight=False)
        fleet.supervisor.watch()
        console.print(f"running answers get {drain_timeout_s:g} s to end; Ctrl-C again ends them now", highlight=False)


def resolve_model(model: str) -> tuple[Path, str]:
    """Folder and served name. A name of the catalogue is fetched if need be; anything else is a folder, served by its own name."""
    if model in CATALOGUE:
        return fetched(model), model
    folder = Path(model).expanduser().absolute()
    return folder, folder.name


@contextmanager
def supervised(drain_timeout_s: float, console: Console, verbose: bool) -> Iterator[Supervisor]:
    """A supervisor that Ctrl-C asks to stop; leaving the block ends what it started, whatever the reason.

    Raises ServiceError at the end when a service had to be killed.
    """
    with stop_events() as (first, again):
        supervisor = Supervisor(new_run_dir(CliConfig.from_environment().cache_dir / "runs"), drain_timeout_s, first, again)
        show_line = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        show_line(f"logs: {supervisor.run_dir}")
        if verbose:
            follower = LogFollower(show_line)
            supervisor.tick = lambda: follower.poll(supervisor.services)
        try:
            yield supervisor
        finally:
            show_line("stopping")
            killed = supervisor.stop()
        if killed:
            raise ServiceError(f"killed because they did not end within their drain: {', '.join(killed)}; logs: {supervisor.run_dir}")


@contextmanager
def running_fleet(options: FleetOptions, drain_timeout_s: float, console: Console, verbose: bool) -> Iterator[RunningFleet]:
    """A fleet that serves; leaving the block stops it, whatever the reason.

    Raises ServiceError when a service does not start or had to be killed at the end, StopAskedError for a stop signal before all serve.
    """
    with supervised(drain_timeout_s, console, verbose) as supervisor:
        with progress_line(console) as note:
            addresses = start_fleet(options, supervisor, note)
        yield RunningFleet(supervisor, addresses)


def new_run_dir(parent: Path) -> Path:
    """A folder for the logs and ready files of one run, named by time and process; of runs that are over, only the latest few are kept."""
    parent.mkdir(parents=True, exist_ok=True)
    over = sorted(path for path in parent.iterdir() if path.is_dir() and not _runs(path.name.rpartition("-")[2]))
    for old in over[: max(0, len(over) - RUNS_KEPT + 1)]:
        shutil.rmtree(old, ignore_errors=True)
    run_dir = parent / f"{datetime.now(tz=UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    run_dir.mkdir()
    return run_dir


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def progress_line(console: Console) -> Iterator[Callable[[str], None]]:
    """One line that changes on a terminal, one line a step elsewhere; says at the end how long it took."""
    started_s = time.monotonic()
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield partial(console.print, highlight=False, soft_wrap=True)
    console.print(f"all services are serving after {time.monotonic() - started_s:.1f} s", highlight=False)


def print_addresses(console: Console, fleet: RunningFleet) -> None:
    addresses = fleet.addresses
    rows = {"model": addresses.model, "HTTP (OpenAI)": f"http://{addresses.http}/v1", "gRPC": addresses.grpc, **addresses.workers}
    for name, value in rows.items():
        console.print(f"{name:<14} {value}", markup=False, highlight=False, soft_wrap=True)
