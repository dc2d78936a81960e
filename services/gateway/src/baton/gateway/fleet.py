"""The servers behind this gateway, and the routes through them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.gateway.compatibility import differences
from baton.gateway.limits import RouteLimits, limits_of
from baton.gateway.worker import Leg, Worker
from baton.servicekit import get_logger
from baton.wire.v1 import worker_pb2

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """One plain server, or a prefill and a decode server whose fingerprints are equal, in that order."""

    servers: tuple[Worker, ...]
    limits: RouteLimits

    @property
    def is_split(self) -> bool:
        return len(self.servers) == 2

    @property
    def instances(self) -> tuple[str, ...]:
        """Ids of the processes that are there now."""
        return tuple(server.instance_id for server in self.servers)


def trusted(routes: Sequence[Route], now: float) -> list[Route]:
    """Those whose servers all answer and have not failed again and again. `now`: time.monotonic(), seconds."""
    return [route for route in routes if all(server.is_trusted(now) for server in route.servers)]


class Fleet:
    """Knows which routes are usable, tells decode servers about prefill servers, and tells `on_ready` when the first route comes or the last goes.

    A pair is a route once decode says that it is connected to that very prefill process: the first request then pays for no first contact.
    """

    def __init__(self, on_ready: Callable[[bool], None]) -> None:
        self.workers: tuple[Worker, ...] = ()
        self.routes: tuple[Route, ...] = ()
        #: Asked for what is wrong with the places that workers are learnt from, one text each.
        self.source_problems: Callable[[], list[str]] = list
        #: Told of an instance that is gone for good: what is kept by instance can be dropped.
        self.on_instance_gone: Callable[[str], None] = lambda instance_id: None
        self._on_ready = on_ready
        self._told: dict[Worker, list[str]] = {}
        self._instances: dict[Worker, str] = {}
        self._refused: set[tuple[str, str]] = set()
        self._by_servers: dict[tuple[Worker, ...], Route] = {}
        self._ready = asyncio.Event()

    @property
    def ready(self) -> bool:
        return bool(self.routes)

    async def wait_ready(self) -> None:
        """Waits for the first usable route."""
        await self._ready.wait()

    def add(self, worker: Worker) -> None:
        """A place more. It is of use once its process has answered."""
        worker.listener = self
        self.workers = (*self.workers, worker)
        self._update(worker)

    def drop(self, worker: Worker) -> None:
        """A place less: nothing runs there any more."""
        worker.listener = None
        self.workers = tuple(one for one in self.workers if one is not worker)
        self._told.pop(worker, None)
        self._instance_gone(self._instances.pop(worker, ""))
        self._by_servers = {servers: route for servers, route in self._by_servers.items() if worker not in servers}
        self._update(worker)

    def worker_changed(self, worker: Worker) -> None:
        if not worker.connected:
            self._told.pop(worker, None)
        before = self._instances.get(worker, "")
        if worker.instance_id != before:
            self._instances[worker] = worker.instance_id
            self._instance_gone(before)
        self._update(worker)

    def counts(self) -> dict[str, dict[str, int]]:
        """By role: how many servers are known, connected, and of use for a new room: in a route."""
        routed = {server for route in self.routes for server in route.servers}
        found = {}
        for leg in Leg:
            servers = [worker for worker in self.workers if worker.leg is leg]
            found[leg.value] = {
                "known": len(servers),
                "connected": sum(worker.connected for worker in servers),
                "usable": sum(worker in routed for worker in servers),
            }
        return found

    def _instance_gone(self, instance_id: str) -> None:
        if instance_id:
            self._refused = {pair for pair in self._refused if instance_id not in pair}
            self.on_instance_gone(instance_id)

    def _update(self, worker: Worker) -> None:
        """After a change of `worker`: looks at its own pairs only, for a fleet of 100 servers has thousands."""
        self._tell_peers(worker)
        if worker in self.workers and worker.info is not None:
            for servers in [(worker,)] if worker.leg is Leg.PLAIN else self._pairs_of(worker):
                route = self._route(servers)
                if route is None:
                    self._by_servers.pop(servers, None)
                else:
                    self._by_servers[servers] = route
        was_ready, self.routes = self.ready, tuple(self._by_servers.values())
        if self.ready != was_ready:
            log.info("fleet ready" if self.ready else "fleet not ready", routes=len(self.routes), problems=self.problems())
            (self._ready.set if self.ready else self._ready.clear)()
            self._on_ready(self.ready)

    def problems(self) -> list[str]:
        """Why servers and pairs that are known cannot be used, and what keeps others from becoming known, one text each."""
        texts = self.source_problems()
        if not self.workers:
            texts.append("no server is known yet: none was named, and none has registered")
        texts += [f"{worker.name}: {worker.unusable_because}" for worker in self.workers if worker.unusable_because]
        texts += [f"{worker.name} is avoided: {worker.avoided_because}" for worker in self.workers if worker.connected and worker.avoided_because]
        for prefill, decode in self._pairs():
            texts += [f"pair refused: {text}" for text in self._differences(prefill, decode)]
            texts += self._path_problem(prefill, decode)
        return texts

    def paths(self) -> list[tuple[Worker, Worker, worker_pb2.PeerState]]:
        """(prefill, decode, what KV pages travel over) of every connected pair."""
        found = [(prefill, decode, decode.path_to(prefill)) for prefill, decode in self._pairs()]
        return [(prefill, decode, path) for prefill, decode, path in found if decode.connected and path.prefill_instance_id]

    def _path_problem(self, prefill: Worker, decode: Worker) -> list[str]:
        """Of two usable servers that fit and are not connected."""
        if prefill.unusable_because or decode.unusable_because or self._differences(prefill, decode):
            return []
        path = decode.path_to(prefill)
        return [] if path.prefill_instance_id else [f"pair of {prefill.name} and {decode.name}: {path.problem or 'not connected'}"]

    def _of(self, leg: Leg) -> list[Worker]:
        return [worker for worker in self.workers if worker.leg is leg and worker.info is not None]

    def _pairs(self) -> list[tuple[Worker, Worker]]:
        return [(prefill, decode) for prefill in self._of(Leg.PREFILL) for decode in self._of(Leg.DECODE)]

    @staticmethod
    def _differences(prefill: Worker, decode: Worker) -> list[str]:
        """Cheap where there are none: every change looks at every pair."""
        if prefill.fingerprint_bytes == decode.fingerprint_bytes:
            return []
        assert prefill.info is not None
        assert decode.info is not None
        return differences(prefill.info, decode.info)

    def _pairs_of(self, worker: Worker) -> list[tuple[Worker, ...]]:
        if worker.leg is Leg.PREFILL:
            return [(worker, decode) for decode in self._of(Leg.DECODE)]
        return [(prefill, worker) for prefill in self._of(Leg.PREFILL)]

    def _route(self, servers: tuple[Worker, ...]) -> Route | None:
        """None: they are no route now."""
        if len(servers) == 2 and (found := self._differences(*servers)):
            self._log_refusal(*servers, found)
            return None
        if any(server.unusable_because for server in servers):
            return None
        if len(servers) == 2 and not servers[1].path_to(servers[0]).prefill_instance_id:
            return None
        return Route(servers, limits_of(servers))

    def _log_refusal(self, prefill: Worker, decode: Worker, found: list[str]) -> None:
        """Once for two instances, not at every report."""
        key = (prefill.instance_id, decode.instance_id)
        if key not in self._refused:
            self._refused.add(key)
            log.error("pair refused: KV pages cannot move between these servers", prefill=key[0], decode=key[1], differences=found)

    def _tell_peers(self, changed: Worker) -> None:
        """A prefill server that is away stays named: decode finds it by itself when it is back, before the first request."""
        if changed.leg is Leg.PLAIN:
            return
        for decode in self._of(Leg.DECODE) if changed.leg is Leg.PREFILL else [changed]:
            if not decode.connected or decode not in self.workers:
                continue
            fitting = [prefill for prefill in self._of(Leg.PREFILL) if not self._differences(prefill, decode)]
            peers = sorted({prefill.info.bootstrap_address for prefill in fitting if prefill.info is not None})
            if self._told.get(decode) != peers:
                self._told[decode] = peers
                decode.outbox.put_peers(peers)
