"""Who registered here, and until when. Pure: the caller brings the clock, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from baton.wire.v1 import fleet_pb2


@dataclass(slots=True)
class _Lease:
    member: fleet_pb2.Member
    lease_s: float
    until: float


class Leases:
    """A lease a process, by instance id."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._leases

    def grant(self, member: fleet_pb2.Member, lease_s: float, now: float) -> None:
        """Anew for an instance that has one."""
        self._leases[member.instance_id] = _Lease(member, lease_s, now + lease_s)

    def renew(self, instance_id: str, now: float) -> bool:
        """False: it has none (any more)."""
        lease = self._leases.get(instance_id)
        if lease is None:
            return False
        lease.until = now + lease.lease_s
        return True

    def end(self, instance_id: str) -> bool:
        return self._leases.pop(instance_id, None) is not None

    def expired(self, now: float) -> list[tuple[str, float]]:
        """(instance id, its lease in seconds) of those that are over; they are forgotten."""
        over = [(name, lease.lease_s) for name, lease in self._leases.items() if lease.until <= now]
        for name, _ in over:
            del self._leases[name]
        return over

    def extend(self, by_s: float) -> None:
        """The gateway itself stood still for that long and could hear nobody: it counts against no lease."""
        for lease in self._leases.values():
            lease.until += by_s
