"""Room tickets, as the gateway hands them out."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.servicekit import Watched
from baton.wire.ticket import TicketKeys
from baton.wire.v1 import common_pb2

#: What a ticket outlives the time in which decode must have published: two hosts' clocks differ.
CLOCK_MARGIN_S = 60.0


class TicketOffice:
    """Says which decode server may publish a room to which prefill server. Without secrets it hands out nothing.

    bootstrap_timeout_s: how long a room waits for its publication. clock: Unix time, seconds.
    """

    def __init__(self, keys: Watched[TicketKeys] | None, *, bootstrap_timeout_s: float, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._lifetime_s = bootstrap_timeout_s + CLOCK_MARGIN_S
        self._clock = clock

    def issue(self, room: int, prefill_instance_id: str, decode_instance_id: str) -> common_pb2.RoomTicket | None:
        """None: this gateway signs no tickets."""
        if self._keys is None:
            return None
        claims = common_pb2.TicketClaims(
            room=room,
            prefill_instance_id=prefill_instance_id,
            decode_instance_id=decode_instance_id,
            expires_at_ms=round((self._clock() + self._lifetime_s) * 1e3),
        )
        return self._keys.value.sign(claims)
