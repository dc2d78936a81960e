"""uvicorn inside the gateway's own event loop: it binds before it serves, leaves signals alone, and stops when told."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from baton.gateway.http.protocol import HttpLimits, limited
from baton.servicekit import AddressUnavailableError, Tls, join_address
from baton.servicekit.tls import tls_files


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the service's lifecycle."""
        yield


class HttpServer:
    """`start`, then `stop`; between them `address` is host:port as bound."""

    def __init__(self, app: Starlette, host: str, port: int, tls: Tls, limits: HttpLimits | None = None, *, shares_port: bool = False) -> None:
        """With a certificate in `tls` it speaks HTTPS only; with a CA file it demands client certificates, as the gRPC port does.

        shares_port: other processes of this user may listen on the same port; the kernel spreads the connections.
        """
        self._app = app
        self._tls = tls
        self.limits = limits or HttpLimits()
        self._host = host
        self._wanted_port = port
        self._shares_port = shares_port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return join_address(self._host, self.port)

    async def start(self) -> int:
        """Binds, serves, and returns the port. Raises AddressUnavailableError, TlsError."""
        config = self._config()
        listening = self._bind()
        self.port = listening.getsockname()[1]
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name="http")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise AddressUnavailableError(f"the HTTP server on {self.address} ended while it started")
            await asyncio.sleep(0.005)
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, gives running answers `grace_s`, then cancels them. Idempotent."""
        if self._server is None or self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(grace_s))
        self._server.should_exit = True
        await self._task
        self._server = self._task = None

    def _config(self) -> uvicorn.Config:
        context = tls_files(self._tls).server_context()
        config = uvicorn.Config(
            self._app,
            http=limited(self.limits),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
            ssl_context_factory=None if context is None else lambda config, default: context,
        )
        config.load()
        return config

    def _bind(self) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            return socket.create_server((self._host, self._wanted_port), family=family, backlog=2048, reuse_port=self._shares_port)
        except OSError as error:
            text = f"cannot listen on {join_address(self._host, self._wanted_port)}: {error.strerror or error}"
            raise AddressUnavailableError(f"{text}; choose another --http-host or --http-port") from error
