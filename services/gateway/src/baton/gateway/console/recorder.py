"""Where the gateway's requests are told to the history: once each, when they have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.gateway.console.history import Ended, History
from baton.gateway.errors import GatewayError
from baton.gateway.live_room import LiveRoom
from baton.gateway.retry import FailedAttempt
from baton.wire.v1 import common_pb2, inference_pb2


class Recorder:
    """A constant amount of work for a request and none for a token.

    A request's last room may still owe a word of its transfer when its answer is complete: it is kept once that room has settled.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._unsettled: dict[int, Ended] = {}

    def ended(
        self,
        request_id: str,
        room: LiveRoom,
        usage: inference_pb2.Usage,
        finish: common_pb2.FinishReason.ValueType | None,
        attempts: Sequence[FailedAttempt],
        num_recomputed: int,
    ) -> None:
        """A request is over; `room` is its last one, `attempts` those before."""
        one = Ended(
            request_id=request_id,
            room=room.room,
            machine=room.machine,
            passage=room.passage,
            ended_at=time.monotonic(),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish=finish,
            failure=room.failure,
            attempts=tuple(attempts),
            num_recomputed=num_recomputed,
        )
        if room.settled.is_set():
            self._keep(one)
        else:
            self._unsettled[room.room] = one

    def closed(self, room: LiveRoom) -> None:
        """No leg of `room` is left."""
        one = self._unsettled.pop(room.room, None)
        if one is not None:
            self._keep(one)

    def refused(self, error: GatewayError) -> None:
        """A request that got no room."""
        self._history.refuse(error.failure())

    def _keep(self, one: Ended) -> None:
        transfer = one.passage.transfer
        if transfer is not None:  # a part of a worker's report, all of which it would keep alive
            one.passage.transfer = inference_pb2.TransferReport()
            one.passage.transfer.CopyFrom(transfer)
        self._history.add(one)
