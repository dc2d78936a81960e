"""Certificates of the connections to servers that are measured."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.bench.errors import SettingError


@dataclass(frozen=True)
class ClientTls:
    """PEM files: what signs the servers' certificates, and what is shown to those that demand one. Without ca_file gRPC is plain text, and https
    trusts what this machine trusts."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """For gRPC; None: plain text. Raises SettingError for files that cannot be read."""
        if self.ca_file is None:
            return None
        return grpc.ssl_channel_credentials(_read(self.ca_file), _read(self.key_file), _read(self.cert_file))

    def context(self) -> ssl.SSLContext:
        """For https. Raises SettingError."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:
            raise SettingError(f"the certificates {', '.join(map(str, self._files()))} cannot be used: {error}") from error
        return context

    def _files(self) -> list[Path]:
        return [path for path in (self.ca_file, self.cert_file, self.key_file) if path is not None]


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(f"the certificate file {str(path)!r} cannot be read: {error.strerror or error}") from error
