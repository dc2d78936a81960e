"""What Baton needs of etcd's v3 API: leases, keys under them, and a watch. One connection to one member of the cluster at a time.

The messages are etcd's own, from the package `aetcd`; its client is not used (it has no TLS and does not tell a caller that a watch broke).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from aetcd import rpc

from baton.servicekit.errors import EtcdError
from baton.servicekit.groups import TlsSettings
from baton.servicekit.tls import open_channel

#: For one answer. A member without a leader, or one that is frozen, does not answer at all.
CALL_TIMEOUT_S = 5.0

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it

#: With it a member that lost its cluster ends our streams instead of leaving them silent.
_REQUIRE_LEADER = (("hasleader", "true"),)


@dataclass(frozen=True, slots=True)
class EtcdEndpoint:
    """One member of the cluster. address: host:port."""

    address: str
    encrypted: bool = False

    def __str__(self) -> str:
        return f"{'https' if self.encrypted else 'http'}://{self.address}"


def parse_endpoint(text: str) -> EtcdEndpoint:
    """Of "host:port", "http://host:port" or "https://host:port", as etcdctl takes them. Raises ValueError."""
    scheme, found, address = text.rpartition("://")
    if found and scheme not in ("http", "https"):
        raise ValueError(f"{text!r}: the scheme is neither http nor https")
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) <= 65535):
        raise ValueError(f"{text!r} is not host:port, http://host:port or https://host:port")
    return EtcdEndpoint(address, encrypted=scheme == "https")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under a prefix as of a revision."""

    revision: int
    values: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Change:
    """value None: the key was deleted, or the lease that it was under ended."""

    key: bytes
    value: bytes | None


class EtcdConnection:
    """Made by `open_etcd`. Every coroutine raises EtcdError when etcd refuses, is away, or does not answer in time; the connection is over then."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._kv: Any = rpc.KVStub(channel)
        self._leases: Any = rpc.LeaseStub(channel)
        self._watches: Any = rpc.WatchStub(channel)

    async def snapshot(self, prefix: bytes) -> Snapshot:
        """Linearizable: what a majority of the cluster agrees on."""
        answer = await self._call(self._kv.Range(rpc.RangeRequest(key=prefix, range_end=_end_of(prefix)), timeout=CALL_TIMEOUT_S))
        return Snapshot(answer.header.revision, {kv.key: kv.value for kv in answer.kvs})

    async def watch(self, prefix: bytes, after: Snapshot) -> AsyncIterator[list[Change]]:
        """Every change after the snapshot, in order. Raises EtcdError when etcd ends it, also because it no longer has all of them: look again."""
        call = self._watches.Watch(metadata=_REQUIRE_LEADER)
        try:
            create = rpc.WatchCreateRequest(key=prefix, range_end=_end_of(prefix), start_revision=after.revision + 1)
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._call(call.write(rpc.WatchRequest(create_request=create)))
                response = await self._call(call.read())
            while True:
                if response is _EOF or response.canceled or response.compact_revision:
                    raise EtcdError(_why_ended(response))
                if response.events:
                    yield [Change(event.kv.key, None if event.type == rpc.Event.DELETE else event.kv.value) for event in response.events]
                response = await self._call(call.read())
        except TimeoutError as error:
            raise EtcdError(f"it did not begin a watch within {CALL_TIMEOUT_S:g} s") from error
        finally:
            call.cancel()

    async def grant(self, lease_s: int) -> int:
        """A lease's id."""
        answer = await self._call(self._leases.LeaseGrant(rpc.LeaseGrantRequest(TTL=lease_s), timeout=CALL_TIMEOUT_S))
        granted: int = answer.ID
        return granted

    async def put(self, key: bytes, value: bytes, lease: int) -> None:
        """The key goes when its lease does."""
        await self._call(self._kv.Put(rpc.PutRequest(key=key, value=value, lease=lease), timeout=CALL_TIMEOUT_S))

    async def keep(self, lease: int, every_s: float, renewed: Callable[[], None]) -> None:
        """Keeps a lease until cancelled; returns when etcd says that there is no such lease (any more). `renewed` is called each time."""
        call = self._leases.LeaseKeepAlive(metadata=_REQUIRE_LEADER)
        try:
            while True:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._call(call.write(rpc.LeaseKeepAliveRequest(ID=lease)))
                    response = await self._call(call.read())
                if response is _EOF:
                    raise EtcdError("it ended the stream that keeps leases")
                if response.TTL <= 0:
                    return
                renewed()
                await asyncio.sleep(every_s)
        except TimeoutError as error:
            raise EtcdError(f"it did not renew a lease within {CALL_TIMEOUT_S:g} s") from error
        finally:
            call.cancel()

    async def revoke(self, lease: int) -> None:
        """Ends a lease and all that is under it."""
        await self._call(self._leases.LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease), timeout=CALL_TIMEOUT_S))

    @staticmethod
    async def _call(awaitable: Any) -> Any:
        try:
            return await awaitable
        except grpc.aio.AioRpcError as error:
            raise EtcdError(f"{error.code().name}: {error.details()}") from error
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:  # a write to a stream that has just ended
            raise EtcdError(f"the stream ended: {error}") from error


@asynccontextmanager
async def open_etcd(endpoint: EtcdEndpoint, tls: TlsSettings, options: Sequence[tuple[str, int | str]] = ()) -> AsyncIterator[EtcdConnection]:
    """A connection, closed on leaving. https needs `tls` with a CA file; its certificate, if any, is shown. Raises EtcdError, TlsError."""
    if endpoint.encrypted and tls.ca_file is None:
        raise EtcdError(f"{endpoint} is encrypted: set --tls-ca-file to what signs its certificate")
    async with open_channel(endpoint.address, tls if endpoint.encrypted else TlsSettings(), options) as channel:
        yield EtcdConnection(channel)


def _end_of(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`, which does not end with byte 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _why_ended(response: Any) -> str:
    if response is _EOF:
        return "it ended the watch"
    if response.compact_revision:
        return f"it no longer has the changes before revision {response.compact_revision}"
    return f"it cancelled the watch: {response.cancel_reason or 'no reason given'}"
