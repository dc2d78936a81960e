"""From an admitted request to a live room: a route is chosen, a room drawn, both legs started at once under one deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from opentelemetry.trace import Span
from structlog.stdlib import BoundLogger

from baton.gateway.admission import Admitted
from baton.gateway.errors import GatewayError
from baton.gateway.fleet import Route, trusted
from baton.gateway.live_room import LiveRoom
from baton.gateway.local_prefill import LocalPrefill
from baton.gateway.report import Passage
from baton.gateway.room_clock import UNLIMITED, Timeouts
from baton.gateway.rooms import RoomTable
from baton.gateway.routing import Expectation, Router
from baton.gateway.tickets import TicketOffice
from baton.gateway.worker import Leg, Worker
from baton.servicekit import Buckets
from baton.wire.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class Order:
    """A request that was admitted: what is the same in every room that it gets. accepted_at, deadline: time.monotonic(), seconds.

    cache_salt: who shares prefixes with whom; the API key's id, so that no tenant can tell by the time of an answer what another one asked.
    """

    admitted: Admitted
    accepted_at: float
    deadline: float
    traceparent: str
    log: BoundLogger
    span: Span
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Dispatcher:
    rooms: RoomTable
    router: Router
    timeouts: Timeouts
    max_buffered_tokens: int
    local: LocalPrefill
    tickets: TicketOffice
    #: Where the gaps between tokens are counted; None: nowhere.
    gaps: Buckets | None = None

    def dispatch(self, order: Order, routes: Sequence[Route], *, number: int = 1, follows: Passage | None = None) -> LiveRoom:
        """Opens a room on one of `routes`, all of which can take the request; servers that fail or are silent only where there are no others.

        number: which attempt it is. follows: the room whose answer goes on. Raises DrainingError, OverloadedError for the first one.
        """
        if number == 1:
            self.rooms.check_capacity()
        now = time.monotonic()
        decision = self.router.choose(trusted(routes, now) or routes, order.admitted.prompt, order.cache_salt)
        route = decision.route
        order.span.set_attributes({"baton.routing": decision.reason, "baton.prefix_tokens": decision.prefix_tokens})
        route = self.local.place(route, order.admitted.prompt, lambda server: self.router.told(server, order.admitted.prompt, order.cache_salt))
        expected = self.router.sent(route.servers, order.admitted.prompt, order.cache_salt)
        for server in route.servers:
            server.breaker.chosen(now)
        passage = self._passage(order, route, follows)
        log = order.log if number == 1 else order.log.bind(attempt=number)
        try:
            return self.rooms.open(
                lambda room, on_closed: LiveRoom(
                    room,
                    self._starts(room, order, route),
                    passage=passage,
                    timeouts=self.timeouts,
                    deadline=order.deadline,
                    max_buffered=self.max_buffered_tokens,
                    log=log.bind(room=room, routing=decision.reason, prefix_tokens=decision.prefix_tokens),
                    span=order.span,
                    on_closed=lambda closed: self._closed(closed, expected, on_closed),
                ),
                again=number > 1,
            )
        except GatewayError:
            expected.over()
            raise

    def fork(self, order: Order, source: LiveRoom) -> LiveRoom:
        """Opens a room for another answer to the prompt of `source`, which has just been opened for the same request: on the server that makes that
        one's answer, right behind it. It takes no place from others: the request came in with places for all of its rooms."""
        server, passage = source.servers[-1], source.passage
        return self.rooms.open(
            lambda room, on_closed: LiveRoom(
                room,
                [(server, self._fork_start(room, order, source.room))],
                passage=replace(passage),
                timeouts=UNLIMITED,
                deadline=order.deadline,
                max_buffered=self.max_buffered_tokens,
                log=order.log.bind(room=room, fork_of=source.room),
                span=order.span,
                on_closed=on_closed,
                fork_of=source,
            ),
            again=True,
        )

    def _fork_start(self, room: int, order: Order, source: int) -> worker_pb2.Start:
        start = self._common(room, order)
        start.bootstrap_timeout_ms = start.waiting_timeout_ms = 0
        start.fork.of_room = source
        return start

    def _passage(self, order: Order, route: Route, follows: Passage | None) -> Passage:
        servers = route.servers
        alone = len(servers) == 1 and servers[0].leg is Leg.DECODE
        passage = Passage(order.accepted_at, servers[0].instance_id, servers[-1].instance_id, prefilled_on_decode=alone, gaps=self.gaps)
        if alone:
            self.rooms.counters["prefilled_on_decode"] += 1
        if follows is not None:
            passage.follows(follows)
        return passage

    def _closed(self, room: LiveRoom, expected: Expectation, tell: Callable[[LiveRoom], None]) -> None:
        expected.over()
        self.local.note(room.machine, room.passage)
        tell(room)

    def _starts(self, room: int, order: Order, route: Route) -> list[tuple[Worker, worker_pb2.Start]]:
        common = self._common(room, order)
        starts = [(server, _with_leg(common, server, route)) for server in route.servers]
        if route.is_split:
            self._add_ticket(starts[-1][1], *route.instances)
        starts[-1][1].forks = order.admitted.num_choices - 1
        return starts

    def _common(self, room: int, order: Order) -> worker_pb2.Start:
        return worker_pb2.Start(
            room=room,
            prompt_token_ids=order.admitted.prompt,
            sampling=order.admitted.sampling,
            deadline_ms=max(1, math.ceil((order.deadline - time.monotonic()) * 1e3)),
            bootstrap_timeout_ms=round(self.timeouts.bootstrap_s * 1e3),
            waiting_timeout_ms=round(self.timeouts.waiting_s * 1e3),
            traceparent=order.traceparent,
            cache_salt=order.cache_salt,
            priority=order.priority,
        )

    def _add_ticket(self, start: worker_pb2.Start, prefill_instance_id: str, decode_instance_id: str) -> None:
        ticket = self.tickets.issue(start.room, prefill_instance_id, decode_instance_id)
        if ticket is not None:
            start.decode.ticket.CopyFrom(ticket)


def _with_leg(common: worker_pb2.Start, server: Worker, route: Route) -> worker_pb2.Start:
    start = worker_pb2.Start()
    start.CopyFrom(common)
    if server.leg is Leg.PLAIN:
        start.plain.SetInParent()
        return start
    if len(route.servers) == 1:
        start.local.SetInParent()
        return start
    prefill, decode = route.servers
    assert prefill.info is not None
    if server.leg is Leg.PREFILL:
        start.prefill.decode_instance_id = decode.instance_id
    else:
        start.decode.bootstrap_address = prefill.info.bootstrap_address
        start.decode.prefill_instance_id = prefill.instance_id
    return start
