"""Registration in etcd: one key under a lease of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.servicekit import ServicekitError, TlsSettings, get_logger
from baton.servicekit.etcd import EtcdConnection, EtcdEndpoint, open_etcd
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.member import member_key, member_to_json
from baton.wire.v1 import fleet_pb2
from baton.workerkit.joining.announcer import Retries

log = get_logger(__name__)


class EtcdAnnouncer:
    """An Announcer. One member of the cluster after the other is tried; a lease that etcd lost is replaced by a new one."""

    def __init__(self, endpoints: Sequence[EtcdEndpoint], prefix: str, member: fleet_pb2.Member, lease_s: int, tls: TlsSettings) -> None:
        self._endpoints = list(endpoints)
        self._key = member_key(prefix, member.instance_id)
        self._value = member_to_json(member)
        self._lease_s = lease_s
        self._tls = tls
        self._lease: int | None = None
        self._number = 0

    async def run(self) -> None:
        retries = Retries("etcd")
        while True:
            try:
                async with open_etcd(self._endpoint, self._tls, CHANNEL_OPTIONS) as connection:
                    await self._keep(connection, retries)
            except ServicekitError as error:
                problem = f"{self._endpoint}: {error}"
            self._number += 1
            await asyncio.sleep(retries.failed(problem))

    async def leave(self) -> None:
        if self._lease is None:
            return
        lease, self._lease = self._lease, None
        try:
            async with open_etcd(self._endpoint, self._tls, CHANNEL_OPTIONS) as connection:
                await connection.revoke(lease)
        except ServicekitError as error:
            log.warning("could not deregister: the lease will end", etcd=str(self._endpoint), lease_s=self._lease_s, problem=str(error))
        else:
            log.info("deregistered", etcd=str(self._endpoint))

    @property
    def _endpoint(self) -> EtcdEndpoint:
        return self._endpoints[self._number % len(self._endpoints)]

    async def _keep(self, connection: EtcdConnection, retries: Retries) -> None:
        """Ends with an EtcdError. The lease outlives a connection: it is renewed over the next one, if etcd still has it."""
        while True:
            if self._lease is None:
                lease = await connection.grant(self._lease_s)
                await connection.put(self._key, self._value, lease)
                self._lease = lease
                log.info("registered", etcd=str(self._endpoint), key=self._key.decode(), lease_s=self._lease_s)
            await connection.keep(self._lease, every_s=self._lease_s / 3, renewed=retries.succeeded)
            log.warning("etcd does not know our lease any more: registering again", etcd=str(self._endpoint))
            self._lease = None
