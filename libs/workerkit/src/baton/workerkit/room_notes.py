"""What logs, traces and metrics hear of a worker's rooms."""

from __future__ import annotations

from collections import Counter

from opentelemetry import trace

from baton.engine.types import EngineEvent, Failed, Failure, KVReady, Role, Transferred
from baton.servicekit import FailedRoom, get_logger, mark_failed
from baton.wire.status import log_reason, stage_name
from baton.workerkit.ended_legs import EndedLegs
from baton.workerkit.metrics import TransferMetrics
from baton.workerkit.rooms import OpenRoom
from baton.workerkit.session import GatewaySession
from baton.workerkit.transfer_spans import trace_transfer

log = get_logger(__name__)

Room = OpenRoom[GatewaySession]


def at_ms(entry: Room, at: float) -> float:
    """Since the room came here; at: time.monotonic(), seconds."""
    return max(0.0, (at - entry.request.arrived) * 1e3)


class RoomNotes:
    """Of one worker. `failures` is counted for whoever collects metrics, `counters` is the front's."""

    def __init__(self, role: Role, tracer: trace.Tracer, counters: Counter[str], transfers: TransferMetrics | None) -> None:
        self.failures: Counter[FailedRoom] = Counter()
        self._role = role
        self._tracer = tracer
        self._ended_legs = EndedLegs(tracer)
        self._counters = counters
        self._transfers = transfers

    def refused(self, room: int, failure: Failure) -> None:
        """A Start that was not taken."""
        log.info("room refused", room=room, cause=failure.cause, reason=failure.message)
        self._counters[f"refused/{failure.cause}"] += 1

    def milestone(self, entry: Room, event: EngineEvent, at: float) -> None:
        self._see(entry, event, at)
        log.info("room", **entry.names(), milestone=type(event).__name__, at_ms=round(at_ms(entry, at), 3))

    def succeeded(self, entry: Room, event: EngineEvent, at: float) -> None:
        """Its leg here is over, and its span with it."""
        self.milestone(entry, event, at)
        self._counters["succeeded"] += 1
        self._ended_legs.add(entry.room, entry.span)
        entry.span.end()

    def failed(self, entry: Room, event: Failed, at: float) -> None:
        """The same, badly."""
        failure, stage = event.failure, stage_name(entry.stage)
        by_client = failure.origin == "client"
        reason = log_reason(failure.cause, failure.message)
        self._see(entry, event, at)
        tell = log.info if by_client else log.warning
        tell(
            "room failed",
            **entry.names(),
            code=failure.code,
            origin=failure.origin,
            stage=stage,
            cause=failure.cause,
            elapsed_ms=round(at_ms(entry, at)),
            allowed_ms=entry.allowed_ms or entry.whole_ms,
            reason=reason,
        )
        entry.span.set_status(trace.StatusCode.ERROR, reason)
        if not by_client:
            mark_failed(entry.span)
        self._count(entry, failure, stage)
        entry.span.end()

    def failed_elsewhere(self, room: int, failure: Failure) -> None:
        """A room whose leg here is over has failed: that is for its trace."""
        if not self._ended_legs.failed(room, failure):
            self._counters["abort_unknown"] += 1

    def _count(self, entry: Room, failure: Failure, stage: str) -> None:
        self._counters[f"failed/{failure.origin}/{stage}/{failure.cause}"] += 1
        is_split = self._role is not Role.PLAIN and not entry.request.local
        peer = "none" if not is_split else "decode" if self._role is Role.PREFILL else "prefill"
        self.failures[FailedRoom(failure.origin, stage, failure.cause, peer, is_split)] += 1

    def _see(self, entry: Room, event: EngineEvent, at: float) -> None:
        entry.span.add_event(type(event).__name__)
        if isinstance(event, Transferred):
            trace_transfer(self._tracer, entry.span, event.stats, at)
            if self._transfers is not None:
                self._transfers.transferred(event.stats)
        elif isinstance(event, KVReady) and self._transfers is not None:
            self._transfers.landed(event)
