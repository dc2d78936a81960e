"""`baton fleet`: what an operator sees of a gateway's fleet and changes while it serves."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Annotated, TypeVar

import grpc
import grpc.aio
import typer
from google.protobuf.json_format import MessageToDict
from rich.table import Table
from rich.text import Text

from baton.cli import reaching as to
from baton.cli.output import whole_console
from baton.wire.member import role_name
from baton.wire.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc

app = typer.Typer(
    help="A gateway's servers: list, add, drain, remove, with a key of role admin; a gateway without keys is only listed.", no_args_is_help=True
)

CALL_TIMEOUT_S = 10.0

#: The gateway speaks of headers: it does not know who asks.
_KEY_HINT = "; give this command an operator's with --api-key-file or BATON_API_KEY (`baton key new --role admin` makes one)"

T = TypeVar("T")

Metadata = tuple[tuple[str, str], ...]

Server = Annotated[str, typer.Argument(help="Its instance id or its address, as `baton fleet list` shows them.")]


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"


_ROLES = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE, Role.PLAIN: common_pb2.ROLE_PLAIN}


@app.command("list")
def list_servers(
    as_json: Annotated[bool, typer.Option("--json", help="The gateway's whole answer as JSON (baton.v1.ListWorkersResponse).")] = False,
    address: to.Address = to.DEFAULT_ADDRESS,
    api_key_file: to.ApiKeyFile = None,
    tls_ca_file: to.TlsCaFile = None,
    tls_cert_file: to.TlsCertFile = None,
    tls_key_file: to.TlsKeyFile = None,
) -> None:
    """Shows every server that the gateway knows, and what keeps any of them from being used."""
    found = to.reach(api_key_file, tls_ca_file, tls_cert_file, tls_key_file)
    answer = _call(address, found, lambda stub, more: stub.List(fleet_pb2.ListWorkersRequest(), metadata=more, timeout=CALL_TIMEOUT_S))
    if as_json:
        print(json.dumps(MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True), indent=1))
        return
    _show(answer)


def _show(answer: fleet_pb2.ListWorkersResponse) -> None:
    console = whole_console()
    console.print(f"gateway {answer.gateway_id} is {'ready' if answer.ready else 'not ready'}", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("role", "instance", "address", "from", "state", "rooms", "free pages", "tokens in flight"):
        table.add_column(name, overflow="fold")
    for worker in answer.workers:
        load = worker.info.load
        instance, state = worker.info.instance_id or "?", worker.unusable_because or "in use"
        cached = f", {load.cached_pages} cached" if load.cached_pages else ""
        pages = f"{load.free_pages} of {load.total_pages}{cached}" if worker.HasField("info") else ""
        cells = (instance, worker.address, ", ".join(worker.sources), state, str(worker.rooms), pages, str(load.tokens_in_flight))
        table.add_row(role_name(worker.role), *(Text(cell) for cell in cells))
    if answer.workers:
        console.print(table)
    for problem in answer.problems:
        console.print(f"problem: {problem}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def add(
    role: Annotated[Role, typer.Argument(help="What the server does.")],
    server: Annotated[str, typer.Argument(help="host:port of its gRPC.", metavar="server")],
    address: to.Address = to.DEFAULT_ADDRESS,
    api_key_file: to.ApiKeyFile = None,
    tls_ca_file: to.TlsCaFile = None,
    tls_cert_file: to.TlsCertFile = None,
    tls_key_file: to.TlsKeyFile = None,
) -> None:
    """Names a server to the gateway, as on its command line, until it is removed or the gateway ends."""
    request = fleet_pb2.AddWorkerRequest(role=_ROLES[role], address=server)
    found = to.reach(api_key_file, tls_ca_file, tls_cert_file, tls_key_file)
    _call(address, found, lambda stub, more: stub.Add(request, metadata=more, timeout=CALL_TIMEOUT_S))
    print(f"{server} is in the fleet of {address}; `baton fleet list` shows when it is used")


@app.command()
def drain(
    server: Server,
    address: to.Address = to.DEFAULT_ADDRESS,
    api_key_file: to.ApiKeyFile = None,
    tls_ca_file: to.TlsCaFile = None,
    tls_cert_file: to.TlsCertFile = None,
    tls_key_file: to.TlsKeyFile = None,
) -> None:
    """Tells a server to take no new requests, from no gateway; what runs there goes on. It leaves when that has ended; its process stays."""
    request = fleet_pb2.DrainWorkerRequest(worker=_name(server))
    found = to.reach(api_key_file, tls_ca_file, tls_cert_file, tls_key_file)
    answer = _call(address, found, lambda stub, more: stub.Drain(request, metadata=more, timeout=CALL_TIMEOUT_S))
    print(f"{server} drains; {answer.rooms} requests of this gateway go on there")


@app.command()
def remove(
    server: Server,
    now: Annotated[bool, typer.Option("--now", help="End what runs there; requests that may go on elsewhere do.")] = False,
    address: to.Address = to.DEFAULT_ADDRESS,
    api_key_file: to.ApiKeyFile = None,
    tls_ca_file: to.TlsCaFile = None,
    tls_cert_file: to.TlsCertFile = None,
    tls_key_file: to.TlsKeyFile = None,
) -> None:
    """Takes a server out of this gateway's fleet once its requests there have ended. The server is told nothing, other gateways keep it."""
    request = fleet_pb2.RemoveWorkerRequest(worker=_name(server), now=now)
    found = to.reach(api_key_file, tls_ca_file, tls_cert_file, tls_key_file)
    answer = _call(address, found, lambda stub, more: stub.Remove(request, metadata=more, timeout=CALL_TIMEOUT_S))
    print(f"{server} leaves the fleet of {address}; {answer.rooms} requests there {'were ended' if now else 'go on until they end'}")


def _name(server: str) -> fleet_pb2.WorkerName:
    return fleet_pb2.WorkerName(address=server) if ":" in server else fleet_pb2.WorkerName(instance_id=server)


def _call(address: str, found: to.Reach, ask: "Callable[[fleet_pb2_grpc.FleetAsyncStub, Metadata], Awaitable[T]]") -> T:
    """Raises CallError with the gateway's own words, UsageError for certificates that cannot be used."""

    async def call() -> T:
        async with to.channel_to(address, found) as channel:
            return await ask(fleet_pb2_grpc.FleetStub(channel), found.metadata)

    try:
        return asyncio.run(call())
    except grpc.aio.AioRpcError as error:
        hint = _KEY_HINT if error.code() is grpc.StatusCode.UNAUTHENTICATED else ""
        raise to.call_error(address, error, hint) from error
