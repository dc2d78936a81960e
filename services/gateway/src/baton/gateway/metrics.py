"""The gateway's metrics: looked up in what it counts anyway, and recorded once a request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.gateway.attempts import Attempts
from baton.gateway.fleet import Fleet
from baton.gateway.gate import Gate
from baton.gateway.rooms import RoomTable
from baton.gateway.worker import Leg
from baton.servicekit import Metrics
from baton.servicekit.metrics import Values
from baton.wire.status import stage_name
from baton.wire.v1 import common_pb2, inference_pb2


class GatewayMetrics:
    """`ended` and `refused` are called on the event loop; what is observed is looked at from the exporter's thread.

    gaps: where the time between two tokens of an answer is counted, token by token; None when metrics are off.
    """

    def __init__(self, metrics: Metrics, rooms: RoomTable, gate: Gate, fleet: Fleet) -> None:
        self._enabled = metrics.enabled
        self.gaps = metrics.buckets("baton.request.inter_token_latency")
        self._ended = metrics.recorder("baton.requests.ended")
        self._refused = metrics.recorder("baton.requests.refused")
        self._finished = metrics.recorder("baton.answers.finished")
        self._left = metrics.recorder("baton.clients.left")
        self._duration = metrics.recorder("baton.request.duration")
        self._first_token = metrics.recorder("baton.request.time_to_first_token")
        self._stage = metrics.recorder("baton.request.stage.duration")
        self._num_prompt_tokens = self._num_completion_tokens = 0
        metrics.observe_one("baton.tokens.prompt", lambda: self._num_prompt_tokens)
        metrics.observe_one("baton.tokens.completion", lambda: self._num_completion_tokens)
        for outcome in ("success", "failed", "left"):
            self._ended.record(0, outcome=outcome)
        _observe_rooms(metrics, rooms, gate)
        _observe_fleet(metrics, fleet)

    def refused(self, cause: str) -> None:
        """A request that got no room."""
        self._refused.record(1, cause=cause)

    def left_queue(self) -> None:
        """A request whose client was gone before it got a room."""
        self._left.record(1, stage="queued", cause="client_gone")

    def ended(self, attempts: Attempts, usage: inference_pb2.Usage, ended_by: Sequence[str] = ()) -> None:
        """A request that had a room, and has none any more or needs none. ended_by: what made each of its answers complete; empty: it is not."""
        if not self._enabled:
            return
        room, passage = attempts.room, attempts.room.passage
        end = passage.ended_at or time.monotonic()
        outcome = "success" if room.failure is None else "left" if room.failure.origin == common_pb2.ORIGIN_CLIENT else "failed"
        self._ended.record(1, outcome=outcome)
        for reason in ended_by if outcome == "success" else ():
            if reason:
                self._finished.record(1, reason=reason)
        if room.failure is not None and outcome == "left":
            self._left.record(1, stage=stage_name(room.failure.stage).lower(), cause=room.failure.cause)
        self._duration.record(end - passage.accepted_at, outcome=outcome)
        self._num_prompt_tokens += usage.prompt_tokens
        self._num_completion_tokens += usage.completion_tokens
        if passage.first_token_at is not None:
            self._first_token.record(passage.first_token_at - passage.accepted_at)
        if room.failure is None:
            self._stages(attempts, end)

    def _stages(self, attempts: Attempts, end: float) -> None:
        """Of a request's last room; what was before it was waiting only where there was no other."""
        spans = attempts.room.machine.spans(end)
        if not attempts.failed:
            self._stage.record(spans[0][1] - attempts.room.passage.accepted_at, stage="queued")
        for state, entered, left in spans:
            self._stage.record(left - entered, stage=state.name.lower())


def _observe_rooms(metrics: Metrics, rooms: RoomTable, gate: Gate) -> None:
    metrics.observe_failures(rooms.failures)
    metrics.observe_one("baton.rooms.open", lambda: len(rooms))
    metrics.observe_one("baton.rooms.succeeded", lambda: rooms.outcomes["success"])
    metrics.observe("baton.rooms.retried", lambda: _retries(rooms))
    metrics.observe("baton.queue.length", lambda: [(gate.num_waiting, {"queue": "admission"})])
    metrics.observe_one("baton.tokens.recomputed", lambda: rooms.counters["recomputed_tokens"])
    metrics.observe_one("baton.streams.continued", lambda: rooms.counters["streams_continued"])
    metrics.observe_one("baton.prefills.on_decode", lambda: rooms.counters["prefilled_on_decode"])


def _observe_fleet(metrics: Metrics, fleet: Fleet) -> None:
    metrics.observe_one("baton.routes", lambda: len(fleet.routes))
    metrics.observe("baton.servers", lambda: _servers(fleet))


def _retries(rooms: RoomTable) -> Values:
    return [(count, {"origin": origin, "stage": stage.lower(), "cause": cause}) for (origin, stage, cause), count in list(rooms.retries.items())]


def _servers(fleet: Fleet) -> Values:
    workers = fleet.workers
    for leg in Leg:
        servers = [worker for worker in workers if worker.leg is leg]
        yield len(servers), {"server": leg.value, "state": "known"}
        yield sum(worker.connected for worker in servers), {"server": leg.value, "state": "connected"}
        yield sum(not worker.unusable_because for worker in servers), {"server": leg.value, "state": "usable"}
        yield sum(worker.connected and bool(worker.avoided_because) for worker in servers), {"server": leg.value, "state": "avoided"}
