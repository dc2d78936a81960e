"""All places where a worker is known: begun when it serves, taken back when it drains."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.servicekit import Watched, get_logger, watch_secrets
from baton.servicekit.etcd import parse_endpoint
from baton.servicekit.groups import TlsSettings
from baton.wire.v1 import fleet_pb2
from baton.workerkit.joining.announcer import Announcer
from baton.workerkit.joining.etcd import EtcdAnnouncer
from baton.workerkit.joining.gateway import GatewayAnnouncer
from baton.workerkit.joining.settings import JoinSettings

log = get_logger(__name__)

#: How long taking it back may hold up a drain.
LEAVE_TIMEOUT_S = 2.0


class Joining:
    """`start`, then `leave`; both on the event loop."""

    def __init__(self, settings: JoinSettings, member: fleet_pb2.Member, tls: TlsSettings) -> None:
        """Raises SecretFileError."""
        self._watched: list[Watched[Any]] = []
        self._announcers: list[Announcer] = []
        self._tasks: list[asyncio.Task[None]] = []
        key = registration_key(settings)
        if key is not None:
            self._watched.append(key)
        for address in settings.gateway_address:
            self._announcers.append(GatewayAnnouncer(address, member, settings.lease_s, tls, lambda: "" if key is None else key.value))
        if settings.etcd:
            endpoints = [parse_endpoint(text) for text in settings.etcd]
            self._announcers.append(EtcdAnnouncer(endpoints, settings.etcd_prefix, member, settings.lease_s, tls))

    def start(self) -> list[asyncio.Task[None]]:
        """The tasks that keep it known; none of them ends by itself."""
        parts = [(announcer.run(), f"announcer {number}") for number, announcer in enumerate(self._announcers)]
        parts += [(watched.run(), f"clock of {watched.what}") for watched in self._watched]
        self._tasks = [asyncio.create_task(part, name=name) for part, name in parts]
        return self._tasks

    async def leave(self) -> None:
        """Nobody sends new rooms any more. Idempotent; over within LEAVE_TIMEOUT_S, whatever the others do."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        announcers, self._announcers = self._announcers, []
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.gather(*(announcer.leave() for announcer in announcers))
        except TimeoutError:
            log.warning("not deregistered everywhere: those leases will end", allowed_s=LEAVE_TIMEOUT_S)


def registration_key(settings: JoinSettings) -> Watched[str] | None:
    """What this server shows when it registers; None where no file is named. A server calls it before it loads anything, too: then a mistake is
    told at once. Raises SecretFileError."""
    path = settings.registration_key_file
    return None if path is None else watch_secrets("--registration-key-file", path, _first)


def _first(secrets: Any) -> str:
    if not secrets:
        raise ValueError("there is no key in it")
    first: bytes = secrets[0]
    return first.decode()
