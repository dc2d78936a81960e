"""Follows the members that workers put into etcd, and tells the fleet of every change."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from baton.gateway.discovery.etcd_view import EtcdView
from baton.gateway.discovery.membership import Membership, Offer, Source
from baton.gateway.discovery.places import Places
from baton.gateway.worker import leg_of
from baton.servicekit import ServicekitError, TlsSettings, get_logger
from baton.servicekit.etcd import EtcdConnection, EtcdEndpoint, open_etcd
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.member import members_prefix

log = get_logger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class EtcdSource:
    """`run` follows etcd until cancelled. When etcd is away the fleet stays as it was last known; `problems` says so."""

    def __init__(
        self, endpoints: Sequence[EtcdEndpoint], prefix: str, view: EtcdView, membership: Membership, places: Places, tls: TlsSettings
    ) -> None:
        self._endpoints = list(endpoints)
        self._prefix = members_prefix(prefix)
        self._view = view
        self._membership = membership
        self._places = places
        self._tls = tls
        self._away_since: float | None = time.monotonic()
        self._problem = "not connected yet"

    async def run(self) -> None:
        grace = asyncio.create_task(self._watch_grace(), name="grace of members that etcd lost")
        try:
            await self._follow()
        finally:
            grace.cancel()
            await asyncio.gather(grace, return_exceptions=True)

    def problems(self) -> list[str]:
        now = time.monotonic()
        texts = self._view.problems(now)
        if self._away_since is not None:
            where = ", ".join(map(str, self._endpoints))
            texts.append(f"etcd at {where} is away for {now - self._away_since:.0f} s ({self._problem}): the fleet is as it was last known")
        return texts

    async def _follow(self) -> None:
        """One member of the cluster after the other, again and again."""
        backoff_s, number = FIRST_BACKOFF_S, 0
        while True:
            endpoint = self._endpoints[number % len(self._endpoints)]
            try:
                async with open_etcd(endpoint, self._tls, CHANNEL_OPTIONS) as connection:
                    await self._follow_one(connection, endpoint)
            except ServicekitError as error:
                if self._away_since is None:
                    backoff_s = FIRST_BACKOFF_S
                self._note_away(endpoint, str(error))
            number += 1
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _follow_one(self, connection: EtcdConnection, endpoint: EtcdEndpoint) -> None:
        """Ends with an EtcdError."""
        snapshot = await connection.snapshot(self._prefix)
        self._view.replace(snapshot.values, time.monotonic())
        self._note_back(endpoint, len(snapshot.values))
        self._tell("etcd does not name it any more")
        async for changes in connection.watch(self._prefix, snapshot):
            for change in changes:
                if change.value is None:
                    self._deleted(change.key)
                else:
                    self._view.put(change.key, change.value)
            self._tell("it has left etcd: it deregistered, or its lease expired")

    def _deleted(self, key: bytes) -> None:
        """A worker that goes says so to us as well, before it ends its lease. One that has not, and answers on its session, is alive: its lease
        was lost (an etcd that stood still ends leases before it hears that they are kept), and it will be back."""
        member = self._view.member(key)
        worker = None if member is None else self._places.find(member.address)
        if member is not None and worker is not None and worker.is_well(member.instance_id):
            log.warning("a living worker's lease is lost in etcd: it is kept", worker=member.instance_id)
            self._view.lose(key, time.monotonic())
        else:
            self._view.delete(key)

    def _drop_draining(self) -> bool:
        """Its word to us that it goes may come after etcd's that it is gone."""
        found = False
        for key in self._view.missing:
            member = self._view.member(key)
            worker = None if member is None else self._places.find(member.address)
            if member is not None and worker is not None and worker.draining and worker.instance_id == member.instance_id:
                self._view.delete(key)
                found = True
        return found

    def _tell(self, reason: str) -> None:
        """The fleet, what etcd says now."""
        members, told = self._view.members, self._membership.of(Source.ETCD)
        for key in told.keys() - members.keys():
            self._membership.drop(Source.ETCD, key, reason)
        for key, member in members.items():
            offer = Offer(Source.ETCD, key, leg_of(member.role), member.address)
            if told.get(key) != offer:
                self._membership.put(offer)
        self._places.sync()

    def _note_away(self, endpoint: EtcdEndpoint, problem: str) -> None:
        if self._away_since is None or problem != self._problem:
            log.warning("etcd is away: the fleet stays as it is", endpoint=str(endpoint), problem=problem, members=len(self._view.members))
        self._away_since = self._away_since or time.monotonic()
        self._problem = problem

    def _note_back(self, endpoint: EtcdEndpoint, num_members: int) -> None:
        away_s = 0.0 if self._away_since is None else time.monotonic() - self._away_since
        log.info("etcd connected", endpoint=str(endpoint), members=num_members, away_s=round(away_s, 3))
        self._away_since = None

    async def _watch_grace(self) -> None:
        """On its own clock: what etcd lost goes when its grace is over, also if nothing else happens."""
        while True:
            await asyncio.sleep(0.25)
            if self._drop_draining():
                self._tell("it deregistered")
            now, due = time.monotonic(), self._view.next_due()
            if due is None or due > now or self._away_since is not None:
                continue
            gone = self._view.expire(now)
            log.warning("members that etcd lost did not come back", workers=gone)
            self._tell("etcd lost it, and it did not register again")
