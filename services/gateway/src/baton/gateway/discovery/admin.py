"""baton.v1.Fleet: what an operator sees of the fleet and changes while it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from baton.gateway.callers import Caller, Doorkeeper
from baton.gateway.discovery.drain import drain
from baton.gateway.discovery.membership import Membership, Offer, Source
from baton.gateway.discovery.places import Places
from baton.gateway.errors import GatewayError, NotConnectedError
from baton.gateway.fleet import Fleet
from baton.gateway.grpc_front import Context, abort, authorization
from baton.gateway.worker import ROLES, Worker, leg_of
from baton.servicekit import get_logger
from baton.wire.member import MemberError, check_address, role_name
from baton.wire.v1 import fleet_pb2, fleet_pb2_grpc

log = get_logger(__name__)

SERVICE = "baton.v1.Fleet"


class FleetAdmin(fleet_pb2_grpc.FleetServicer):
    """For callers with a key of role admin; List for all where there are no keys. Add and Remove change the fleet here, Drain the worker."""

    def __init__(self, membership: Membership, places: Places, fleet: Fleet, *, gateway_id: str, doorkeeper: Doorkeeper) -> None:
        self._membership = membership
        self._places = places
        self._fleet = fleet
        self._gateway_id = gateway_id
        self._doorkeeper = doorkeeper

    async def List(self, request: fleet_pb2.ListWorkersRequest, context: Context) -> fleet_pb2.ListWorkersResponse:  # noqa: N802
        await self._authorised(self._doorkeeper.operator, context)
        return fleet_pb2.ListWorkersResponse(
            gateway_id=self._gateway_id,
            ready=self._fleet.ready,
            workers=[self._state(worker) for worker in sorted(self._fleet.workers, key=lambda one: (one.leg.value, one.address))],
            problems=self._fleet.problems(),
        )

    async def Add(self, request: fleet_pb2.AddWorkerRequest, context: Context) -> fleet_pb2.AddWorkerResponse:  # noqa: N802
        operator = await self._operator(context)
        try:
            check_address(request.address, "address")
        except MemberError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if role_name(request.role) == "unspecified":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"role={request.role} is none of prefill, decode, plain")
        there = self._places.find(request.address)
        if there is not None and not there.leaving and there.leg is not leg_of(request.role):
            text = f"{request.address} is in the fleet as a {there.leg.value} server: remove it first"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        log.info("worker added by an operator", address=request.address, role=role_name(request.role), operator=operator.key_id)
        self._membership.put(Offer(Source.ADDED, request.address, leg_of(request.role), request.address))
        self._places.sync()
        return fleet_pb2.AddWorkerResponse()

    async def Drain(self, request: fleet_pb2.DrainWorkerRequest, context: Context) -> fleet_pb2.DrainWorkerResponse:  # noqa: N802
        operator = await self._operator(context)
        worker = await self._named(request.worker, context)
        try:
            return fleet_pb2.DrainWorkerResponse(rooms=drain(worker, operator))
        except NotConnectedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def Remove(self, request: fleet_pb2.RemoveWorkerRequest, context: Context) -> fleet_pb2.RemoveWorkerResponse:  # noqa: N802
        operator = await self._operator(context)
        worker = await self._named(request.worker, context)
        rooms = worker.num_rooms
        log.info(
            "worker removed by an operator", worker=worker.instance_id, address=worker.address, rooms=rooms, now=request.now, operator=operator.key_id
        )
        self._membership.remove(worker.address, "an operator removed it")
        self._places.sync()
        if request.now:
            self._places.end_rooms(worker.address)
        return fleet_pb2.RemoveWorkerResponse(rooms=rooms)

    async def _operator(self, context: Context) -> Caller:
        return await self._authorised(self._doorkeeper.require_admin, context)

    async def _authorised(self, judge: Callable[[Sequence[str]], Caller], context: Context) -> Caller:
        """Ends the call of anybody else."""
        try:
            return judge(authorization(context))
        except GatewayError as error:
            await abort(context, error)

    async def _named(self, name: fleet_pb2.WorkerName, context: Context) -> Worker:
        """Ends the call with NOT_FOUND when there is no such worker."""
        for worker in self._fleet.workers:
            if name.address == worker.address if name.WhichOneof("name") == "address" else name.instance_id == worker.instance_id != "":
                return worker
        known = ", ".join(f"{worker.instance_id or '?'} at {worker.address}" for worker in self._fleet.workers) or "none"
        asked = name.address or name.instance_id
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no worker {asked!r} is in this gateway's fleet; there are: {known}")
        raise AssertionError("abort returns never")

    def _state(self, worker: Worker) -> fleet_pb2.WorkerState:
        state = fleet_pb2.WorkerState(
            address=worker.address,
            role=ROLES[worker.leg],
            sources=self._membership.sources(worker.address),
            connected=worker.connected,
            unusable_because=worker.unusable_because,
            leaving=bool(worker.leaving),
            rooms=worker.num_rooms,
        )
        if worker.info is not None:
            state.info.CopyFrom(worker.info)
            state.info.load.CopyFrom(worker.load)
            state.info.draining = worker.draining
        return state
