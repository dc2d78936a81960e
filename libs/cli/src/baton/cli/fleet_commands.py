"""`baton fleet`: what an operator sees of a gateway's fleet and changes while it serves."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import grpc
import grpc.aio
import typer
from rich.console import Console
from rich.table import Table

from baton.cli.chat import DEFAULT_ADDRESS
from baton.cli.config import CliConfig
from baton.cli.errors import CallError, UsageError
from baton.servicekit import TlsError, TlsSettings, open_channel
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.member import role_name
from baton.wire.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc

app = typer.Typer(help="A gateway's servers: list, add, drain, remove. BATON_API_KEY must be a key of role admin.", no_args_is_help=True)

CALL_TIMEOUT_S = 10.0

T = TypeVar("T")

Metadata = tuple[tuple[str, str], ...]

Gateway = Annotated[str, typer.Option("--gateway", help="The gateway's gRPC address.")]
Roots = Annotated[Path | None, typer.Option(help="PEM certificates that sign the gateway's; with it the connection is encrypted.")]
Server = Annotated[str, typer.Argument(help="Its instance id or its address, as `baton fleet list` shows them.")]


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"


_ROLES = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE, Role.PLAIN: common_pb2.ROLE_PLAIN}


@app.command("list")
def list_servers(gateway: Gateway = DEFAULT_ADDRESS, tls_ca_file: Roots = None) -> None:
    """Shows every server that the gateway knows, and what keeps any of them from being used."""
    answer = _call(gateway, tls_ca_file, lambda stub, more: stub.List(fleet_pb2.ListWorkersRequest(), metadata=more, timeout=CALL_TIMEOUT_S))
    console = Console()
    console.print(f"gateway {answer.gateway_id} is {'ready' if answer.ready else 'not ready'}", highlight=False)
    table = Table("role", "instance", "address", "from", "state", "rooms", "free pages", "tokens in flight", box=None, pad_edge=False)
    for worker in answer.workers:
        load = worker.info.load
        instance, state = worker.info.instance_id or "?", worker.unusable_because or "in use"
        pages = f"{load.free_pages} of {load.total_pages}" if worker.HasField("info") else ""
        cells = (instance, worker.address, ", ".join(worker.sources), state, str(worker.rooms), pages, str(load.tokens_in_flight))
        table.add_row(role_name(worker.role), *cells)
    if answer.workers:
        console.print(table, soft_wrap=True)
    for problem in answer.problems:
        console.print(f"problem: {problem}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def add(
    role: Annotated[Role, typer.Argument(help="What the server does.")],
    address: Annotated[str, typer.Argument(help="host:port of its gRPC.")],
    gateway: Gateway = DEFAULT_ADDRESS,
    tls_ca_file: Roots = None,
) -> None:
    """Names a server to the gateway, as on its command line, until it is removed or the gateway ends."""
    request = fleet_pb2.AddWorkerRequest(role=_ROLES[role], address=address)
    _call(gateway, tls_ca_file, lambda stub, more: stub.Add(request, metadata=more, timeout=CALL_TIMEOUT_S))
    print(f"{address} is in the fleet of {gateway}; `baton fleet list` shows when it is used")


@app.command()
def drain(server: Server, gateway: Gateway = DEFAULT_ADDRESS, tls_ca_file: Roots = None) -> None:
    """Tells a server to take no new requests, from no gateway; what runs there goes on. It leaves when that has ended; its process stays."""
    request = fleet_pb2.DrainWorkerRequest(worker=_name(server))
    answer = _call(gateway, tls_ca_file, lambda stub, more: stub.Drain(request, metadata=more, timeout=CALL_TIMEOUT_S))
    print(f"{server} drains; {answer.rooms} requests of this gateway go on there")


@app.command()
def remove(
    server: Server,
    now: Annotated[bool, typer.Option("--now", help="End what runs there; requests that may go on elsewhere do.")] = False,
    gateway: Gateway = DEFAULT_ADDRESS,
    tls_ca_file: Roots = None,
) -> None:
    """Takes a server out of this gateway's fleet once its requests there have ended. The server is told nothing, other gateways keep it."""
    request = fleet_pb2.RemoveWorkerRequest(worker=_name(server), now=now)
    answer = _call(gateway, tls_ca_file, lambda stub, more: stub.Remove(request, metadata=more, timeout=CALL_TIMEOUT_S))
    print(f"{server} leaves the fleet of {gateway}; {answer.rooms} requests there {'were ended' if now else 'go on until they end'}")


def _name(server: str) -> fleet_pb2.WorkerName:
    return fleet_pb2.WorkerName(address=server) if ":" in server else fleet_pb2.WorkerName(instance_id=server)


def _call(address: str, roots: Path | None, ask: "Callable[[fleet_pb2_grpc.FleetAsyncStub, Metadata], Awaitable[T]]") -> T:
    """Raises CallError with the gateway's own words, UsageError for certificates that cannot be used."""
    key = CliConfig.from_environment().api_key
    shown = (("authorization", f"Bearer {key}"),) if key else ()

    async def call() -> T:
        async with open_channel(address, TlsSettings(ca_file=roots), CHANNEL_OPTIONS) as channel:
            return await ask(fleet_pb2_grpc.FleetStub(channel), shown)

    try:
        return asyncio.run(call())
    except TlsError as error:
        raise UsageError(str(error)) from error
    except grpc.aio.AioRpcError as error:
        raise CallError(f"the gateway at {address} answered {error.code().name}: {error.details()}") from error
