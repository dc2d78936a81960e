"""The members that etcd names, as a gateway sees them: what is known stays so while etcd is away. Pure; the caller brings the clock, in seconds."""

from __future__ import annotations

from collections.abc import Mapping

from baton.wire.member import MemberError, member_from_json
from baton.wire.v1 import fleet_pb2


class EtcdView:
    """Fed with snapshots and changes; `members` is what the fleet should be.

    Not everything that etcd says is the truth: one that comes back without its data has lost what workers put there, one that was frozen ends
    their leases before it hears them, and they need a moment to notice. So what a snapshot lacks and was known before is kept for `grace_s`
    (`replace`), and so is what the caller knows to be alive (`lose`).
    """

    def __init__(self, model: str, grace_s: float) -> None:
        """model: members that serve another one are none of ours."""
        self._model = model
        self._grace_s = grace_s
        self._known: dict[bytes, fleet_pb2.Member] = {}
        self._missing_until: dict[bytes, float] = {}
        self._unreadable: dict[bytes, str] = {}
        self._others: dict[bytes, str] = {}

    @property
    def members(self) -> dict[str, fleet_pb2.Member]:
        """By instance id."""
        return {member.instance_id: member for member in self._known.values()}

    def replace(self, values: Mapping[bytes, bytes], now: float) -> None:
        """A snapshot: all that etcd has now."""
        self._unreadable.clear()
        self._others.clear()
        for key in self._known.keys() - values.keys():
            self.lose(key, now)
        for key, value in values.items():
            self.put(key, value)

    def put(self, key: bytes, value: bytes) -> None:
        self._missing_until.pop(key, None)
        self._unreadable.pop(key, None)
        self._others.pop(key, None)
        try:
            member = member_from_json(value)
        except MemberError as error:
            self._known.pop(key, None)
            self._unreadable[key] = str(error)
            return
        if member.model != self._model:
            self._known.pop(key, None)
            self._others[key] = member.model
            return
        self._known[key] = member

    def lose(self, key: bytes, now: float) -> None:
        """It is not in etcd any more, and may be again soon."""
        if key in self._known:
            self._missing_until[key] = now + self._grace_s

    def delete(self, key: bytes) -> None:
        for one in (self._known, self._missing_until, self._unreadable, self._others):
            one.pop(key, None)

    def member(self, key: bytes) -> fleet_pb2.Member | None:
        return self._known.get(key)

    @property
    def missing(self) -> list[bytes]:
        """Keys that are kept although etcd has them no more."""
        return list(self._missing_until)

    def next_due(self) -> float | None:
        """When `expire` has something to do next."""
        return min(self._missing_until.values(), default=None)

    def expire(self, now: float) -> list[str]:
        """Lets go what is still missing when its grace is over: their instance ids."""
        over = [key for key, until in self._missing_until.items() if until <= now]
        for key in over:
            del self._missing_until[key]
        return [member.instance_id for key in over if (member := self._known.pop(key, None)) is not None]

    def problems(self, now: float) -> list[str]:
        texts = [f"etcd key {key.decode(errors='replace')}: {why}" for key, why in self._unreadable.items()]
        texts += [
            f"{self._known[key].instance_id} is not in etcd any more, which lost it; kept for {max(0.0, until - now):.0f} s"
            for key, until in self._missing_until.items()
            if key in self._known
        ]
        if self._others and not self._known:
            models = ", ".join(sorted(set(self._others.values())))
            texts.append(f"etcd names {len(self._others)} servers of other models ({models}) and none of {self._model!r}")
        return texts
