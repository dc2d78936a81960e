"""A room's part on each of its servers, from its start there until it is over there."""

from __future__ import annotations

from baton.gateway.worker import Leg, RoomSink, Worker
from baton.wire.v1 import common_pb2, worker_pb2


class Legs:
    """Of one room. True while one is not over. Each worker is told of a leg's end once."""

    def __init__(self, room: int, servers: tuple[Worker, ...]) -> None:
        """servers: prefill first; of a fork those of the room that it goes on behind."""
        self.servers = servers
        self._room = room
        self._open: dict[Leg, Worker] = {}
        self._over: list[Worker] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, leg: Leg) -> bool:
        return leg in self._open

    @property
    def names(self) -> list[str]:
        """Those that are not over, for logs."""
        return [leg.value for leg in self._open]

    def server(self, leg: Leg) -> Worker:
        return next(worker for worker in self.servers if worker.leg is leg)

    def begin(self, worker: Worker, start: worker_pb2.Start, sink: RoomSink) -> None:
        """Raises GatewayError where the worker cannot take it; there is no leg then."""
        worker.start(start, sink)
        self._open[worker.leg] = worker

    def over(self, leg: Leg) -> None:
        """It ended there as it should, or late. Idempotent."""
        worker = self._open.pop(leg, None)
        if worker is not None:
            worker.release(self._room)
            self._over.append(worker)

    def failed(self, leg: Leg) -> None:
        """Its server knows why it ended and hears no more of it. Idempotent."""
        worker = self._open.pop(leg, None)
        if worker is not None:
            worker.release(self._room)

    def abort(self, failure: common_pb2.Failure) -> None:
        """Ends all that are not over."""
        legs, self._open = self._open, {}
        for worker in legs.values():
            worker.abort(self._room, failure)

    def tell_over(self, failure: common_pb2.Failure) -> None:
        """Tells the servers whose leg was over before the room failed."""
        for worker in self._over:
            worker.tell_failed(self._room, failure)
