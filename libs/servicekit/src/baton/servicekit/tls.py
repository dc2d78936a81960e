"""TLS credentials from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio

from baton.servicekit.errors import TlsError
from baton.servicekit.groups import TlsSettings


def server_credentials(tls: TlsSettings) -> grpc.ServerCredentials | None:
    """Credentials for a listening port; None: plain text. With a CA file, clients must show a certificate that it signed."""
    if tls.cert_file is None or tls.key_file is None:
        return None
    pair = (_read("--tls-key-file", tls.key_file), _read("--tls-cert-file", tls.cert_file))
    roots = None if tls.ca_file is None else _read("--tls-ca-file", tls.ca_file)
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials | None:
    """Credentials for a channel to another service of Baton; None: plain text."""
    if tls.ca_file is None:
        return None
    roots = _read("--tls-ca-file", tls.ca_file)
    if tls.cert_file is None or tls.key_file is None:
        return grpc.ssl_channel_credentials(root_certificates=roots)
    return grpc.ssl_channel_credentials(
        root_certificates=roots, private_key=_read("--tls-key-file", tls.key_file), certificate_chain=_read("--tls-cert-file", tls.cert_file)
    )


def open_channel(address: str, tls: TlsSettings, options: Sequence[tuple[str, int | str]] = ()) -> grpc.aio.Channel:
    """A channel to host:port, encrypted if `tls` has a CA file. The caller closes it."""
    credentials = channel_credentials(tls)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=list(options))
    return grpc.aio.secure_channel(address, credentials, options=list(options))


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{flag}={str(path)!r}: {error.strerror or error}") from error
