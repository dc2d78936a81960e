"""A grpc.aio server with health and reflection, plain text or TLS: start, drain, stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from baton.servicekit.begun import Begun, Registrar
from baton.servicekit.errors import AddressUnavailableError
from baton.servicekit.groups import TlsSettings
from baton.servicekit.tls import Tls, tls_files

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
#: No call may have begun for so many seconds and turns of the loop before a server is told to stop: one that has arrived takes a busy loop four turns
#: to begin. Longer where calls do come, until those who call in quick succession are all kept waiting; and how many seconds are given to that.
_QUIET_S, _QUIET_TURNS, _QUIET_AFTER_CALLS_S, _QUIET_WITHIN_S = 0.02, 12, 0.3, 5.0


class GrpcServer:
    """One listening gRPC server. Add servicers, `start`, then `set_serving(True)` when the service can take requests."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: Tls | None = None,
        options: Sequence[tuple[str, int | str]] = (),
        max_concurrent_rpcs: int | None = None,
        port_flag: str = "--port",
    ) -> None:
        """`port` 0 lets the system choose; `port_flag` is where an operator sets it. Must be made on the event loop that runs it."""
        self._host = host
        self._wanted_port = port
        self._port_flag = port_flag
        self._tls: Tls = tls or TlsSettings()
        self._server = grpc.aio.server(options=list(options), maximum_concurrent_rpcs=max_concurrent_rpcs)
        self._begun = Begun()
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []
        self._draining = False
        self.port = 0

    @property
    def address(self) -> str:
        """host:port as bound."""
        return join_address(self._host, self.port)

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, full_name: str) -> None:
        """Registers `servicer` through a generated `add_XServicer_to_server`; `full_name` ("baton.v1.Worker") serves health and reflection."""
        self._register(register, servicer)
        self._names.append(full_name)

    def _register(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        register(servicer, cast("grpc.aio.Server", Registrar(self._server, self._begun)))

    async def start(self) -> int:
        """Binds, starts and returns the port. Health says NOT_SERVING until `set_serving(True)`. Raises AddressUnavailableError, TlsError."""
        self._register(health_pb2_grpc.add_HealthServicer_to_server, self._health)
        reflected = reflection.aio.ReflectionServicer((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME))
        self._register(reflection_pb2_grpc.add_ServerReflectionServicer_to_server, reflected)
        credentials = tls_files(self._tls).server_credentials()
        wanted = join_address(self._host, self._wanted_port)
        unavailable = f"cannot listen on {wanted}: the address is in use or not this host's; choose another --host or {self._port_flag}"
        try:
            port = self._server.add_insecure_port(wanted) if credentials is None else self._server.add_secure_port(wanted, credentials)
        except RuntimeError as error:
            raise AddressUnavailableError(unavailable) from error
        if port == 0:
            raise AddressUnavailableError(unavailable)
        self.port = port
        await self._server.start()
        await self.set_serving(False)
        return port

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 says, for the server ("") and each of its services. Stays NOT_SERVING once `drain` was called."""
        status = _SERVING if serving and not self._draining else _NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def drain(self) -> None:
        """Says NOT_SERVING from now on, so that nobody sends new work; what runs goes on."""
        self._draining = True
        await self.set_serving(False)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuses new calls, gives running ones `grace_s`, then cancels them. Idempotent.

        gRPC's core cancels, without a word, what has arrived and was not begun when it is told to stop. So calls that come now are begun and kept
        waiting, until no more come, and are answered by their servicers once it has been told: each hears why it cannot be had.
        """
        await self.drain()
        self._begun.hold()
        try:
            until, quiet_s = time.monotonic() + _QUIET_WITHIN_S, _QUIET_S
            while await self._has_begun_calls(quiet_s) and time.monotonic() < until:
                quiet_s = _QUIET_AFTER_CALLS_S
            stopping = asyncio.ensure_future(self._server.stop(grace_s))
            await asyncio.sleep(0)  # it has been told
        finally:
            self._begun.let_go()
        await stopping

    async def _has_begun_calls(self, quiet_s: float) -> bool:
        """False once none has begun for `quiet_s` and some turns of the loop."""
        before, since, turns = self._begun.num_calls, time.monotonic(), 0
        while turns < _QUIET_TURNS or time.monotonic() - since < quiet_s:
            await asyncio.sleep(_QUIET_S / _QUIET_TURNS)
            turns += 1
            if self._begun.num_calls != before:
                return True
        return False


def join_address(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
