"""baton.v1.Registry: workers that make themselves known to this gateway, in memory, under leases."""

from __future__ import annotations

import asyncio
import time

import grpc

from baton.gateway.discovery.bearer import BearerKeys, Context, require_key
from baton.gateway.discovery.leases import Leases
from baton.gateway.discovery.membership import Membership, Offer, Source
from baton.gateway.discovery.places import Places
from baton.gateway.worker import leg_of
from baton.servicekit import Watched, get_logger
from baton.wire.member import MAX_LEASE_S, MIN_LEASE_S, MemberError, check_member
from baton.wire.v1 import fleet_pb2, fleet_pb2_grpc

log = get_logger(__name__)

SERVICE = "baton.v1.Registry"
KEY_FLAG = "--registration-key-file"

#: Servers that may be registered at a time: each is connected to, and tried again about once a second while it does not answer.
MAX_REGISTERED = 256
#: How often leases are looked at.
TICK_S = 0.25


class Registry(fleet_pb2_grpc.RegistryServicer):
    """One for a gateway. `run` is its clock."""

    def __init__(self, membership: Membership, places: Places, *, gateway_id: str, model: str, keys: Watched[BearerKeys] | None) -> None:
        self._membership = membership
        self._places = places
        self._gateway_id = gateway_id
        self._model = model
        self._keys = keys
        self._leases = Leases()

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Context) -> fleet_pb2.RegisterResponse:  # noqa: N802
        await require_key(context, self._keys, KEY_FLAG)
        member = request.member
        try:
            check_member(member)
            if not MIN_LEASE_S <= request.lease_s <= MAX_LEASE_S:
                raise MemberError(f"lease_s={request.lease_s} is outside [{MIN_LEASE_S}, {MAX_LEASE_S}]")
        except MemberError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if member.model != self._model:
            text = f"{member.instance_id} serves model {member.model[:80]!r}, this gateway {self._model!r}: start both with the same --model-name"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        if member.instance_id not in self._leases and len(self._leases) >= MAX_REGISTERED:
            text = f"{len(self._leases)} servers are registered with this gateway, the limit is {MAX_REGISTERED}: let some deregister, or use etcd"
            log.warning("registration refused", worker=member.instance_id, address=member.address, registered=len(self._leases))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        if not self._membership.put(Offer(Source.REGISTERED, member.instance_id, leg_of(member.role), member.address)):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{member.instance_id} was removed from this gateway by an operator")
        self._leases.grant(member, request.lease_s, time.monotonic())
        self._places.sync()
        return fleet_pb2.RegisterResponse(gateway_id=self._gateway_id)

    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Context) -> fleet_pb2.HeartbeatResponse:  # noqa: N802
        await require_key(context, self._keys, KEY_FLAG)
        if request.instance_id not in self._membership.of(Source.REGISTERED) or not self._leases.renew(request.instance_id, time.monotonic()):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.instance_id!r} is not registered here: register it")
        return fleet_pb2.HeartbeatResponse()

    async def Deregister(self, request: fleet_pb2.DeregisterRequest, context: Context) -> fleet_pb2.DeregisterResponse:  # noqa: N802
        await require_key(context, self._keys, KEY_FLAG)
        self._leases.end(request.instance_id)
        self._drop(request.instance_id, "it deregistered")
        return fleet_pb2.DeregisterResponse()

    async def run(self) -> None:
        """Ends leases that nobody renews; until cancelled. While this process itself stood still, nobody could renew one."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - before > 2 * TICK_S:
                self._leases.extend(now - before - TICK_S)
            for instance_id, lease_s in self._leases.expired(now):
                log.warning("lease expired", worker=instance_id, lease_s=lease_s)
                self._drop(instance_id, f"its lease of {lease_s:g} s has expired")

    def _drop(self, instance_id: str, reason: str) -> None:
        if self._membership.drop(Source.REGISTERED, instance_id, reason):
            self._places.sync()
