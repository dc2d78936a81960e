"""Who may publish a room here: the holder of a ticket that the gateway signed for it, once."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable

from baton.engine.types import Failure
from baton.prefill.errors import TicketRefusedError
from baton.servicekit import Watched
from baton.wire.ticket import TicketError, TicketKeys, TicketKeyUnknownError
from baton.wire.v1 import bootstrap_pb2, common_pb2

#: Tickets that were used and have not expired; at 1,000 rooms a second and six minutes a ticket there are 360,000 of them.
MAX_USED = 1_000_000


class TicketGate:
    """Checks publications. Without secrets it demands no ticket and refuses those that have one: somebody believes that they are checked.

    counters: causes of refusals. clock: Unix time, seconds. Used on the event loop.
    """

    def __init__(
        self, instance_id: str, keys: Watched[TicketKeys] | None, *, clock: Callable[[], float] = time.time, max_used: int = MAX_USED
    ) -> None:
        self._instance_id = instance_id
        self._keys = keys
        self._clock = clock
        self._max_used = max_used
        self._used: set[bytes] = set()
        self._expiries: list[tuple[int, bytes]] = []
        self.counters: Counter[str] = Counter()

    def check(self, publication: bootstrap_pb2.Publish, decode_instance_id: str) -> None:
        """Uses the publication's ticket up. Raises TicketRefusedError, which says what is wrong with it and what to do."""
        try:
            self._check(publication, decode_instance_id)
        except TicketRefusedError as error:
            self.counters[error.failure.cause] += 1
            raise

    def _check(self, publication: bootstrap_pb2.Publish, decode_instance_id: str) -> None:
        has_ticket = publication.HasField("ticket")
        if self._keys is None:
            if has_ticket:
                raise self._misfit("ticket_unchecked", "prefill", "carries a ticket, and this server has no secret to check it with")
            return
        if not has_ticket:
            raise self._misfit("ticket_missing", "gateway", "carries no ticket, and this server demands one: its gateway signs none")
        claims = self._verified(publication.ticket, self._keys.value)
        now_ms = round(self._clock() * 1e3)
        self._compare(claims, publication.room, decode_instance_id, now_ms)
        self._use(publication.ticket.mac, claims.expires_at_ms, now_ms)

    def _verified(self, ticket: common_pb2.RoomTicket, keys: TicketKeys) -> common_pb2.TicketClaims:
        try:
            return keys.verify(ticket)
        except TicketKeyUnknownError as error:
            raise self._misfit(error.cause, "gateway", f"carries a ticket of another secret: {error}") from error
        except TicketError as error:
            raise _denied(error.cause, f"carries a ticket that is not genuine: {error}") from error

    def _compare(self, claims: common_pb2.TicketClaims, room: int, decode_instance_id: str, now_ms: int) -> None:
        if claims.room != room:
            raise _denied("ticket_wrong_room", f"carries the ticket of room {claims.room}")
        if claims.decode_instance_id != decode_instance_id:
            raise _denied("ticket_wrong_decode", f"carries the ticket of decode server {claims.decode_instance_id!r}")
        if claims.prefill_instance_id != self._instance_id:
            raise _denied("ticket_wrong_prefill", f"carries a ticket for prefill server {claims.prefill_instance_id!r}")
        late_ms = now_ms - claims.expires_at_ms
        if late_ms >= 0:
            raise _denied("ticket_expired", f"carries a ticket that expired {late_ms / 1e3:.1f} s ago; if that is not so, the hosts' clocks differ")

    def _use(self, mac: bytes, expires_at_ms: int, now_ms: int) -> None:
        while self._expiries and self._expiries[0][0] <= now_ms:
            self._used.discard(heapq.heappop(self._expiries)[1])
        if mac in self._used:
            raise _denied("ticket_replayed", "carries a ticket that was used before")
        if len(self._used) >= self._max_used:
            text = f"cannot be taken: {len(self._used)} tickets that were used have not expired, the limit is {self._max_used}"
            raise TicketRefusedError(Failure("RESOURCE_EXHAUSTED", "prefill", "ticket_memory_full", text))
        self._used.add(mac)
        heapq.heappush(self._expiries, (expires_at_ms, mac))

    def _misfit(self, cause: str, origin: str, text: str) -> TicketRefusedError:
        """The fleet's own settings do not fit together: nobody's attack."""
        remedy = f"give gateways and prefill server {self._instance_id} the same --ticket-secret-file"
        return TicketRefusedError(Failure("INTERNAL", origin, cause, f"{text}: {remedy}"))


def _denied(cause: str, text: str) -> TicketRefusedError:
    return TicketRefusedError(Failure("PERMISSION_DENIED", "decode", cause, text))
