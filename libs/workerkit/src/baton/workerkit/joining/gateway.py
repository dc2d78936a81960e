"""Registration with one gateway: register, heartbeats within the lease, register again when it does not know us any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from baton.servicekit import TlsError, TlsSettings, get_logger, open_channel
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import fleet_pb2, fleet_pb2_grpc
from baton.workerkit.joining.announcer import CALL_TIMEOUT_S, Retries

log = get_logger(__name__)


class GatewayAnnouncer:
    """An Announcer. key: what to show; empty: nothing."""

    def __init__(self, address: str, member: fleet_pb2.Member, lease_s: int, tls: TlsSettings, key: Callable[[], str]) -> None:
        self._address = address
        self._member = member
        self._lease_s = lease_s
        self._tls = tls
        self._key = key
        self._known = False

    async def run(self) -> None:
        retries = Retries(self._address)
        while True:
            try:
                async with open_channel(self._address, self._tls, CHANNEL_OPTIONS) as channel:
                    await self._keep(fleet_pb2_grpc.RegistryStub(channel), retries)
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
            except TlsError as error:
                problem = str(error)
            await asyncio.sleep(retries.failed(problem))

    async def leave(self) -> None:
        if not self._known:
            return
        self._known = False
        try:
            async with open_channel(self._address, self._tls, CHANNEL_OPTIONS) as channel:
                stub = fleet_pb2_grpc.RegistryStub(channel)
                request = fleet_pb2.DeregisterRequest(instance_id=self._member.instance_id)
                await stub.Deregister(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata())
        except (grpc.aio.AioRpcError, TlsError) as error:
            text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            log.warning("could not deregister: the lease will end", gateway=self._address, lease_s=self._lease_s, problem=text)
        else:
            log.info("deregistered", gateway=self._address)

    async def _keep(self, stub: fleet_pb2_grpc.RegistryAsyncStub, retries: Retries) -> None:
        """Ends with the error of a call that failed. A gateway that is a new process answers NOT_FOUND and is told again at once."""
        while True:
            request = fleet_pb2.RegisterRequest(member=self._member, lease_s=self._lease_s)
            answer = await stub.Register(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata())
            self._known = True
            retries.succeeded()
            log.info("registered", gateway=self._address, gateway_id=answer.gateway_id, lease_s=self._lease_s)
            try:
                while True:
                    await asyncio.sleep(self._lease_s / 3)
                    heartbeat = fleet_pb2.HeartbeatRequest(instance_id=self._member.instance_id)
                    await stub.Heartbeat(heartbeat, timeout=min(CALL_TIMEOUT_S, self._lease_s / 3), metadata=self._metadata())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        key = self._key()
        return (("authorization", f"Bearer {key}"),) if key else ()
