"""Everything of the console, wired."""

from __future__ import annotations

import secrets
import time
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any

from starlette.routing import Route

from baton.gateway.callers import Doorkeeper
from baton.gateway.config import GatewaySettings
from baton.gateway.console.feed import Feed
from baton.gateway.console.front import ConsoleFront
from baton.gateway.console.history import History
from baton.gateway.console.link import Link
from baton.gateway.console.pages import Pages
from baton.gateway.console.recorder import Recorder
from baton.gateway.console.rows import Names, ms
from baton.gateway.console.siblings import Siblings
from baton.gateway.console.view import Sources
from baton.gateway.console.watch import SERVICE, ConsoleServicer
from baton.gateway.fleet import Fleet
from baton.gateway.gate import Gate
from baton.gateway.processes.relay import Relay
from baton.gateway.rooms import RoomTable
from baton.servicekit import GrpcServer
from baton.wire.v1 import console_pb2_grpc


class Console:
    """What `--console` turns on. `recorder` is told of every request; `routes` and `serve` are its fronts."""

    def __init__(self, settings: GatewaySettings, instance_id: str, rooms: RoomTable, gate: Gate, fleet: Fleet, doorkeeper: Doorkeeper) -> None:
        about = {
            "gateway": instance_id,
            "model": settings.served_name,
            "version": version("baton-gateway"),
            "processes": settings.processes,
            "process": settings.process_index or 0,
            "keys": doorkeeper.asks_for_keys,
            "started": ms(time.monotonic()),
        }
        history = History()
        self.recorder = Recorder(history)
        rooms.on_closed = self.recorder.closed
        own = settings.process_index
        siblings = Siblings([index for index in range(settings.processes) if index != own] if own is not None else ())
        self._sources = Sources(rooms, gate, fleet, history, about, Names(secrets.token_bytes(16)), siblings)
        self.feed = Feed(self._sources)
        self._doorkeeper = doorkeeper
        self._front = ConsoleFront(self.feed, fleet, doorkeeper, Pages(), settings.http_body_timeout_s)

    def routes(self) -> list[Route]:
        return self._front.routes()

    def serve(self, server: GrpcServer) -> None:
        """Before the server starts."""
        server.add(console_pb2_grpc.add_ConsoleServicer_to_server, ConsoleServicer(self.feed, self._doorkeeper), SERVICE)

    def join(self, relay: Relay | None) -> None:
        """With the other processes of this gateway, where there are any, the feed is that of all."""
        if relay is not None:
            self.feed.refresh = Link(relay, self._sources).ask

    def run(self) -> Coroutine[Any, Any, None]:
        """To run for as long as the gateway serves."""
        return self.feed.run()

    def close(self) -> None:
        """Ends every reader's stream. Idempotent."""
        self.feed.close()
