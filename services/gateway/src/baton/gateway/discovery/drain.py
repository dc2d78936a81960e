"""What draining a server is, whoever's call orders it."""

from __future__ import annotations

from baton.gateway.callers import Caller
from baton.gateway.errors import NotConnectedError, UnknownServerError
from baton.gateway.fleet import Fleet
from baton.gateway.worker import Worker
from baton.servicekit import get_logger

log = get_logger(__name__)


def drain(worker: Worker, operator: Caller) -> int:
    """Tells it to take no new rooms, from no gateway, until its process ends; how many of this gateway's go on there. Raises NotConnectedError."""
    if not worker.connected:
        raise NotConnectedError(f"{worker.name} cannot be told: {worker.problem}; remove it instead")
    log.info("worker drained by an operator", worker=worker.instance_id, address=worker.address, rooms=worker.num_rooms, operator=operator.key_id)
    worker.outbox.put_drain()
    return worker.num_rooms


def drain_instance(fleet: Fleet, instance_id: str, operator: Caller) -> int:
    """As `drain`, by the instance's name. Raises UnknownServerError, NotConnectedError."""
    for worker in fleet.workers:
        if worker.instance_id == instance_id:
            return drain(worker, operator)
    known = ", ".join(worker.instance_id or "?" for worker in fleet.workers) or "none"
    raise UnknownServerError(f"no server {instance_id!r} is in this gateway's fleet; there are: {known}")
