"""The port that Prometheus scrapes: threads of its own, so that a scrape waits for nobody and nobody for a scrape."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from baton.servicekit.errors import AddressUnavailableError
from baton.servicekit.logs import get_logger

log = get_logger(__name__)

#: Connections at once, and seconds that each may take for its handshake and its request.
MAX_CONNECTIONS = 16
CONNECTION_S = 10.0
PATH = "/metrics"

#: What connections that are made now are encrypted with; None: plain text.
Context = Callable[[], ssl.SSLContext | None]


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry, context: Context) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry = registry
        self.scraping = threading.Lock()
        self._context = context
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(CONNECTION_S)
            context = self._context()
            if context is not None:
                try:
                    request = context.wrap_socket(request, server_side=True)
                except OSError as error:  # ssl.SSLError is one as well
                    log.warning("scraper refused", reason=str(error))
                    request.close()
                    return
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("scrape broken off", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:  # http.server's name
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, f"only {PATH} is here")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept") or "")
        with self.server.scraping:  # the exporter keeps one collection at a time
            body = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 # http.server's name
        pass


class MetricsListener:
    """Listens from making it until `close`."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, context: Context) -> None:
        """port 0: the system chooses. Raises AddressUnavailableError."""
        try:
            self._server = _Server(host, port, registry, context)
        except OSError as error:
            text = f"cannot listen on {host}:{port} for metrics: {error.strerror or error}; choose another --metrics-host or --metrics-port"
            raise AddressUnavailableError(text) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Blocks for up to half a second."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
