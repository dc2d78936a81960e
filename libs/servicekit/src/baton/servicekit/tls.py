"""TLS from files that may change while a service runs: connections that are made from then on use what the files say now."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio

from baton.servicekit.certificates import Material, read_material
from baton.servicekit.errors import TlsError
from baton.servicekit.groups import TlsSettings
from baton.servicekit.logs import get_logger
from baton.servicekit.watched import PERIOD_S, Watched

log = get_logger(__name__)

#: How long before the end of its certificate a service says so, and how often it looks.
EXPIRY_WARNING = datetime.timedelta(days=7)
EXPIRY_PERIOD_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Set:
    """One reading of the files, made ready for every kind of connection."""

    material: Material
    server: Any = None  # grpc.ServerCertificateConfiguration
    context: ssl.SSLContext | None = None


class TlsFiles:
    """What one service serves and connects with. `run` is its clock; without it the files of the start stay in force.

    counters: "reloaded", "reload_failed"; "refused/<reason>" for HTTP clients whose handshake failed. Handshakes of gRPC happen in its core,
    which names those that fail on standard error and tells nobody else.
    """

    def __init__(self, settings: TlsSettings) -> None:
        """Raises TlsError."""
        self.settings = settings
        self._refused: Counter[str] = Counter()
        paths = [path for path in (settings.cert_file, settings.key_file, settings.ca_file) if path is not None]
        self._files: Watched[_Set] = Watched("TLS files", paths, self._read)

    @property
    def counters(self) -> Counter[str]:
        return self._files.counters + self._refused

    def refresh(self) -> bool:
        """As Watched.refresh."""
        return self._files.refresh()

    async def run(self, period_s: float = PERIOD_S) -> None:
        """The clock; until cancelled."""
        if self._files.value.material == Material():
            await asyncio.Event().wait()  # plain text: there is nothing to look at
        looked_at = -EXPIRY_PERIOD_S
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() - looked_at >= EXPIRY_PERIOD_S:
                looked_at = loop.time()
                self._note_expiry()
            await asyncio.sleep(period_s)
            await asyncio.to_thread(self._files.refresh)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials for a listening gRPC port; None: plain text. With a CA file, clients must show a certificate that it signed."""
        first = self._files.value
        if first.server is None:
            return None
        handed = first

        def fetch() -> Any:
            """Before each handshake, on a thread of gRPC's; None: as the last time."""
            nonlocal handed
            now = self._files.value
            if now is handed:
                return None
            handed = now
            return now.server

        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            first.server, fetch, require_client_authentication=self.settings.ca_file is not None
        )
        return credentials

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a channel to another service of Baton; None: plain text."""
        material = self._files.value.material
        if material.roots is None:
            return None
        return grpc.ssl_channel_credentials(root_certificates=material.roots, private_key=material.key, certificate_chain=material.chain)

    def server_context(self) -> ssl.SSLContext | None:
        """The same for a listening port of asyncio's; each connection that is made gets what the files say then."""
        return None if self._files.value.context is None else _Current(lambda: self._files.value.context)

    def current_context(self) -> ssl.SSLContext | None:
        """What a connection that is accepted now is to be encrypted with; None: plain text."""
        return self._files.value.context

    def _read(self) -> _Set:
        material = read_material(self.settings)
        if material.chain is None or material.key is None:
            return _Set(material)
        pair = (material.key, material.chain)
        return _Set(material, grpc.ssl_server_certificate_configuration([pair], root_certificates=material.roots), self._context())

    def _context(self) -> ssl.SSLContext:
        settings = self.settings
        assert settings.cert_file is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(settings.cert_file, settings.key_file)
            if settings.ca_file is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(settings.ca_file)
        except OSError as error:  # ssl.SSLError is one as well
            raise TlsError(f"the certificate, key or CA file cannot be used: {error}") from error
        context.sslobject_class = _counting(self._note_refused)
        return context

    def _note_refused(self, error: ssl.SSLError) -> None:
        reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else (error.reason or "unknown").replace("_", " ").lower()
        self._refused[f"refused/{reason}"] += 1
        log.warning("TLS client refused", reason=reason)

    def _note_expiry(self) -> None:
        expires = self._files.value.material.expires
        left = None if expires is None else expires - datetime.datetime.now(datetime.UTC)
        if left is not None and left <= EXPIRY_WARNING:
            hours = round(left / datetime.timedelta(hours=1))
            log.warning("the TLS certificate ends soon: replace its file", file=str(self.settings.cert_file), hours=hours)


Tls = TlsFiles | TlsSettings


def tls_files(tls: Tls) -> TlsFiles:
    """Files of a service that watches them, or such as they are now. Raises TlsError."""
    return tls if isinstance(tls, TlsFiles) else TlsFiles(tls)


def open_channel(address: str, tls: Tls, options: Sequence[tuple[str, int | str]] = ()) -> grpc.aio.Channel:
    """A channel to host:port, encrypted if `tls` has a CA file, with what the files say now. The caller closes it."""
    credentials = tls_files(tls).channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=list(options))
    return grpc.aio.secure_channel(address, credentials, options=list(options))


class _Current(ssl.SSLContext):
    """Stands for whatever context is in force: event loops keep the one that a port was opened with."""

    _current: Callable[[], ssl.SSLContext | None]

    def __new__(cls, current: Callable[[], ssl.SSLContext | None]) -> Self:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._current = current
        return made

    def __init__(self, current: Callable[[], ssl.SSLContext | None]) -> None:
        super().__init__()

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        context = self._current()
        assert context is not None
        return context.wrap_bio(*args, **kwargs)


def _counting(note: Callable[[ssl.SSLError], None]) -> type[ssl.SSLObject]:
    class Counting(ssl.SSLObject):
        """Says which handshakes failed: event loops keep that to themselves."""

        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                note(error)
                raise

    return Counting


def explain_refusal(details: str, tls: Tls, *, was_in_use: bool = False) -> str:
    """What gRPC says of a connection that was not made, with what it does not say: which side refused which certificate. One that was in use was
    refused by nobody: then only what gRPC says."""
    if was_in_use:
        return details
    settings = tls.settings if isinstance(tls, TlsFiles) else tls
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"{details}; the other side's certificate is refused: --tls-ca-file did not sign it, it has expired, or is not for this host"
    if "WRONG_VERSION_NUMBER" in details:
        return f"{details}; the other side speaks plain text: set its --tls-cert-file and --tls-key-file, or unset --tls-ca-file here"
    if settings.ca_file is not None and "Socket closed" in details:
        return f"{details}; if it does TLS, it may have refused our certificate (--tls-cert-file): its standard error says why"
    if settings.ca_file is None and "Socket closed" in details:
        return f"{details}; it may demand TLS: set --tls-ca-file here"
    return details
