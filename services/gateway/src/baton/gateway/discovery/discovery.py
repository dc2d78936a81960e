"""How a gateway learns of its workers: everything of it, wired."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio

from baton.gateway.callers import Doorkeeper
from baton.gateway.config import GatewaySettings
from baton.gateway.discovery.admin import SERVICE as ADMIN_SERVICE
from baton.gateway.discovery.admin import FleetAdmin
from baton.gateway.discovery.bearer import BearerKeys
from baton.gateway.discovery.etcd_source import EtcdSource
from baton.gateway.discovery.etcd_view import EtcdView
from baton.gateway.discovery.membership import Membership, Offer, Source
from baton.gateway.discovery.places import Places
from baton.gateway.discovery.registry import KEY_FLAG as REGISTRATION_KEY_FLAG
from baton.gateway.discovery.registry import SERVICE as REGISTRY_SERVICE
from baton.gateway.discovery.registry import Registry
from baton.gateway.fleet import Fleet
from baton.gateway.processes.relay import Relay
from baton.gateway.worker import Leg, Worker
from baton.gateway.worker_session import WorkerSession
from baton.servicekit import GrpcServer, Watched, watch_secrets
from baton.servicekit.etcd import parse_endpoint
from baton.wire.v1 import fleet_pb2_grpc


class Discovery:
    """Fills `fleet` from the command line at `start`, and from gRPC registrations, etcd and operators from then on."""

    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        gateway_id: str,
        make: Callable[[str, Leg], tuple[Worker, WorkerSession]],
        on_failure: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """make, on_failure: as of Places. Raises SecretFileError."""
        self.membership = Membership()
        self.places = Places(self.membership, fleet, make, on_failure)
        #: Files that are read again when they change.
        self.watched: list[Watched[Any]] = []
        self._settings = settings
        self._fleet = fleet
        self._gateway_id = gateway_id
        self._relay: Relay | None = None
        self._registry = self._make_registry()
        self._etcd = self._make_etcd()
        fleet.source_problems = self._problems

    def serve(self, server: GrpcServer, doorkeeper: Doorkeeper) -> None:
        """Adds the services that workers (where the settings let them register) and operators call."""
        admin = FleetAdmin(self.membership, self.places, self._fleet, gateway_id=self._gateway_id, doorkeeper=doorkeeper)
        parts: list[tuple[Callable[[Any, grpc.aio.Server], None], object, str]] = [(fleet_pb2_grpc.add_FleetServicer_to_server, admin, ADMIN_SERVICE)]
        if self._registry is not None:
            parts.append((fleet_pb2_grpc.add_RegistryServicer_to_server, self._registry, REGISTRY_SERVICE))
        relay = self._relay = self._make_relay()
        for add, servicer, name in parts:
            if relay is None:
                server.add(add, servicer, name)
            else:
                add(servicer, relay.private)
                server.add(relay.register, name, name)

    @property
    def relay(self) -> Relay | None:
        """After `serve`: the way to the other processes of this gateway, where there are any."""
        return self._relay

    def _make_relay(self) -> Relay | None:
        settings = self._settings
        if settings.process_index is None or settings.process_folder is None or settings.processes == 1:
            return None
        return Relay(settings.process_folder, settings.process_index, settings.processes)

    async def listen(self) -> None:
        """Before the public server starts: other processes of this gateway may ask from then on."""
        if self._relay is not None:
            await self._relay.start()

    def start(self) -> list[Coroutine[Any, Any, None]]:
        """Opens the places that the command line names. Returns what is to run from now on."""
        settings = self._settings
        for leg, addresses in ((Leg.PREFILL, settings.prefill), (Leg.DECODE, settings.decode), (Leg.PLAIN, settings.plain)):
            for address in addresses:
                self.membership.put(Offer(Source.NAMED, address, leg, address))
        self.places.sync()
        return [part.run() for part in (self._registry, self._etcd) if part is not None]

    async def close(self) -> None:
        """Ends every session, which ends whatever the workers still hold of ours."""
        if self._relay is not None:
            await self._relay.stop()
        await self.places.close()

    def _make_registry(self) -> Registry | None:
        settings = self._settings
        if not settings.registration:
            return None
        keys = None if settings.registration_key_file is None else self._keys(REGISTRATION_KEY_FLAG, settings.registration_key_file)
        return Registry(self.membership, self.places, gateway_id=self._gateway_id, model=settings.served_name, keys=keys)

    def _make_etcd(self) -> EtcdSource | None:
        settings = self._settings
        if not settings.etcd:
            return None
        view = EtcdView(settings.served_name, settings.etcd_grace_s)
        endpoints = [parse_endpoint(text) for text in settings.etcd]
        return EtcdSource(endpoints, settings.etcd_prefix, view, self.membership, self.places, settings.tls)

    def _keys(self, flag: str, path: Path) -> Watched[BearerKeys]:
        keys = watch_secrets(flag, path, BearerKeys)
        self.watched.append(keys)
        return keys

    def _problems(self) -> list[str]:
        return self._etcd.problems() if self._etcd is not None else []
