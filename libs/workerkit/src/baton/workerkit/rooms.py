"""The rooms that are open on this worker, as its front sees them: whose they are, how far they are, until when they may stay there. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from opentelemetry.trace import Span

from baton.engine.types import (
    Bootstrapped,
    EngineEvent,
    Failed,
    Failure,
    Finished,
    KVReady,
    PrefillStarted,
    Request,
    Reserved,
    Role,
    Transferred,
    TransferStarted,
)
from baton.wire.v1 import common_pb2
from baton.workerkit.intake import DecodePeer, PrefillPeer

Owner = TypeVar("Owner")

_STAGES: dict[type, common_pb2.RoomState.ValueType] = {
    Bootstrapped: common_pb2.ROOM_STATE_WAITING,
    Reserved: common_pb2.ROOM_STATE_WAITING,
    TransferStarted: common_pb2.ROOM_STATE_TRANSFERRING,
    Transferred: common_pb2.ROOM_STATE_SUCCESS,
    KVReady: common_pb2.ROOM_STATE_SUCCESS,
}


@dataclass(slots=True)
class OpenRoom(Generic[Owner]):
    """One room. `owner`: the gateway session that it came over. `waiting_s`: how long WAITING may last, 0: no limit.

    Times are on time.monotonic().
    """

    request: Request
    owner: Owner
    span: Span
    waiting_s: float
    stage: common_pb2.RoomState.ValueType = common_pb2.ROOM_STATE_BOOTSTRAPPING
    stage_deadline: float | None = None
    #: Why it is being ended, once somebody asked for that.
    ending: Failure | None = None
    #: The limit that ended it, for the report.
    allowed_ms: int = 0

    @property
    def room(self) -> int:
        return self.request.room

    def names(self) -> dict[str, int | str]:
        """What its log lines are found by: the room, the server that has its other half, and the trace."""
        named: dict[str, int | str] = {"room": self.room}
        peer = self.request.peer
        if isinstance(peer, PrefillPeer):
            named["peer"] = peer.decode_instance_id
        elif isinstance(peer, DecodePeer):
            named["peer"] = peer.prefill_instance_id
        context = self.span.get_span_context()
        if context.is_valid:
            named |= {"trace_id": format(context.trace_id, "032x"), "span_id": format(context.span_id, "016x")}
        return named

    @property
    def whole_ms(self) -> int:
        """What the request had left when it came here; 0: no limit."""
        return 0 if self.request.deadline is None else round((self.request.deadline - self.request.arrived) * 1e3)

    def due(self) -> float | None:
        """When this room's next limit is reached; None: never."""
        limits = [limit for limit in (self.request.deadline, self.stage_deadline) if limit is not None]
        return min(limits) if limits else None

    def advance(self, event: EngineEvent, role: Role, now: float) -> None:
        """Notes a milestone: the stage, and what the next one's limit is."""
        stage = _STAGES.get(type(event))
        if isinstance(event, PrefillStarted) and (role is Role.PLAIN or self.request.local):
            stage = common_pb2.ROOM_STATE_SUCCESS
        if stage is None or stage <= self.stage:
            return
        self.stage = stage
        self.stage_deadline = self._waiting_limit(role, now) if stage == common_pb2.ROOM_STATE_WAITING else None

    def _waiting_limit(self, role: Role, now: float) -> float | None:
        """Prefill sees its own WAITING end; decode sees nothing between its reservation and the doorbell, so it also grants what prefill may spend
        in BOOTSTRAPPING."""
        if not self.waiting_s:
            return None
        if role is Role.DECODE and self.request.bootstrap_deadline is not None:
            return max(now, self.request.bootstrap_deadline) + self.waiting_s
        return now + self.waiting_s

    def expired(self, now: float, role: Role) -> Failure | None:
        """Why this room must end at `now`, if it must; notes the limit."""
        started = self.request.arrived
        if self.request.deadline is not None and now >= self.request.deadline:
            self.allowed_ms = round((self.request.deadline - started) * 1e3)
            return self._too_late(role, "deadline", "the request's deadline")
        if self.stage_deadline is not None and now >= self.stage_deadline:
            self.allowed_ms = round((self.stage_deadline - started) * 1e3)
            waiting = self.stage == common_pb2.ROOM_STATE_WAITING
            return self._too_late(
                role, "waiting_timeout" if waiting else "bootstrap_timeout", "the waiting timeout" if waiting else "the bootstrap timeout"
            )
        return None

    def _too_late(self, role: Role, cause: str, limit: str) -> Failure:
        origin = "decode" if role is Role.PLAIN else role.value
        stage = common_pb2.RoomState.Name(self.stage).removeprefix("ROOM_STATE_")
        return Failure("DEADLINE_EXCEEDED", origin, cause, f"{limit} of {self.allowed_ms} ms was reached in {stage} on the {role.value} server")


def open_room(request: Request, owner: Owner, span: Span, role: Role, waiting_s: float) -> OpenRoom[Owner]:
    """A room that was taken just now. A plain server has nothing to bootstrap: its rooms begin in WAITING."""
    if role is not Role.PLAIN:
        return OpenRoom(request, owner, span, waiting_s, stage_deadline=request.bootstrap_deadline)
    due = request.arrived + waiting_s if waiting_s else None
    return OpenRoom(request, owner, span, waiting_s, stage=common_pb2.ROOM_STATE_WAITING, stage_deadline=due)


def ends(event: EngineEvent) -> bool:
    """Whether this leg is over with `event`."""
    return isinstance(event, Transferred | Finished | Failed)


class RoomTable(Generic[Owner]):
    """Open rooms by number; numbers of rooms that ended are remembered, up to a bound, because a room is single use."""

    def __init__(self, num_tombstones: int = 65_536) -> None:
        self._open: dict[int, OpenRoom[Owner]] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._num_tombstones = num_tombstones
        #: The open room of that number, or None. The dictionary's own: it is asked for every token.
        self.get: Callable[[int], OpenRoom[Owner] | None] = self._open.get

    def __len__(self) -> int:
        return len(self._open)

    def was_used(self, room: int) -> bool:
        return room in self._open or room in self._ended

    def add(self, entry: OpenRoom[Owner]) -> None:
        assert not self.was_used(entry.room)
        self._open[entry.room] = entry

    def remove(self, room: int) -> None:
        if self._open.pop(room, None) is None:
            return
        self._ended[room] = None
        if len(self._ended) > self._num_tombstones:
            self._ended.popitem(last=False)

    def all(self) -> list[OpenRoom[Owner]]:
        return list(self._open.values())

    def of(self, owner: Owner) -> list[OpenRoom[Owner]]:
        return [entry for entry in self._open.values() if entry.owner is owner]
