"""What differs between the servers: how a request's leg finds the other one."""

from __future__ import annotations

from typing import Any, Protocol

from baton.engine.types import Failure
from baton.sglangcompat.sampling import refused
from baton.wire.v1 import worker_pb2


class Leg(Protocol):
    """is_prefill: its stream ends with the hand-over, and it says that it took the request before its room is started: that needs decode's word."""

    is_prefill: bool

    async def join(self, start: worker_pb2.Start, pairing: Any) -> None:
        """Waits until the other half is known and fills in the leg. pairing: sglang.grpc.scheduler.DisaggregatedParams. Raises RefusedError."""

    def forsake(self, room: int, failure: Failure) -> None:
        """This room will not be started here, and why: whoever waits for it is told. Idempotent."""


class PlainLeg:
    """A server that does both halves."""

    is_prefill = False

    async def join(self, start: worker_pb2.Start, pairing: Any) -> None:
        if pairing.bootstrap_host or pairing.bootstrap_room:
            what = "for a pair, and this is a plain server: name it with --worker-urls, not with --prefill or --decode"
            raise refused("disaggregated_params.bootstrap_host", repr(pairing.bootstrap_host), what)
        start.plain.SetInParent()

    def forsake(self, room: int, failure: Failure) -> None:
        """Nobody waits for it."""
