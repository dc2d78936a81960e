"""How commands reach a gateway: the flags that all of them have, and what they come to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import grpc.aio
import typer

from baton.cli.config import CliConfig
from baton.cli.errors import CallError, UsageError
from baton.servicekit import TlsError, TlsSettings, open_channel
from baton.wire.channel import CHANNEL_OPTIONS

DEFAULT_ADDRESS = "127.0.0.1:8001"
#: How gRPC's own word begins when there is no connection.
_NOBODY = "failed to connect to all addresses"

Address = Annotated[str, typer.Option("--address", "--gateway", help="The gateway's gRPC address, host:port.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="A file that holds the API key, and nothing else; without it BATON_API_KEY is shown, to gateways only.", dir_okay=False),
]
TlsCaFile = Annotated[Path | None, typer.Option(help="PEM certificates that sign the server's; with it the connection is encrypted.", dir_okay=False)]
TlsCertFile = Annotated[Path | None, typer.Option(help="PEM certificate to show a server that demands one.", dir_okay=False)]
TlsKeyFile = Annotated[Path | None, typer.Option(help="PEM private key of that certificate.", dir_okay=False)]


@dataclass(frozen=True)
class Reach:
    """What a client shows and trusts. api_key: empty where there is none. is_named: a flag named the key's file, for the servers of this command."""

    tls: TlsSettings
    api_key: str = field(default="", repr=False)
    is_named: bool = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For gRPC calls."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def reach(api_key_file: Path | None, ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> Reach:
    """Raises UsageError for flags that do not go together and a key file that holds no key; certificates are read when a connection is made."""
    if (cert_file is None) != (key_file is None):
        raise UsageError("--tls-cert-file and --tls-key-file go together: set both or neither")
    if cert_file is not None and ca_file is None:
        raise UsageError("--tls-cert-file is set without --tls-ca-file, so that nothing would be encrypted: name the CA of the server's certificate")
    return Reach(TlsSettings(ca_file=ca_file, cert_file=cert_file, key_file=key_file), _api_key(api_key_file), is_named=api_key_file is not None)


@asynccontextmanager
async def channel_to(address: str, found: Reach) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a gateway's gRPC address: plain text unless a CA file is named. Raises UsageError for certificates that cannot be used, and for
    an address with a scheme."""
    if "://" in address:
        raise UsageError(f"--address is {address!r}, but must be host:port of the gateway's gRPC port, as in {DEFAULT_ADDRESS}")
    try:
        channel = open_channel(address, found.tls, CHANNEL_OPTIONS)
    except TlsError as error:
        raise UsageError(str(error)) from error
    async with channel:
        yield channel


def call_error(address: str, error: grpc.aio.AioRpcError, hint: str = "", details: str | None = None) -> CallError:
    """A call's end as a person reads it: the gateway's own words, or `details` for them. Where nobody answered these are gRPC's."""
    said = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and said.startswith(_NOBODY):
        why = said.rpartition("last error: ")[2]
        return CallError(f"no gateway answers gRPC at {address}: is one running there, and is that its gRPC port? HTTP has one of its own ({why})")
    return CallError(f"the gateway at {address} answered {error.code().name}: {said if details is None else details}{hint}")


def _api_key(file: Path | None) -> str:
    if file is None:
        return CliConfig.from_environment().api_key
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {str(file)!r} cannot be read: {error}") from error
    if not key or len(key.split()) > 1:
        raise UsageError(f"--api-key-file {str(file)!r} must hold one key, as `baton key new` prints it, but holds {len(key.split())} words")
    return key
