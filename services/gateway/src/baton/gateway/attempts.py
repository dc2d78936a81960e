"""The rooms of one request, one after the other: until decode's first token has come, a server's failure is answered by another pair."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

import grpc

from baton.gateway.admission import fitting
from baton.gateway.dispatch import Dispatcher, Order
from baton.gateway.errors import GatewayError, RoomFailedError
from baton.gateway.fleet import Fleet, Route, trusted
from baton.gateway.live_room import LiveRoom
from baton.gateway.retry import FailedAttempt, backoff_s, is_retryable
from baton.wire.status import code_number, origin_name, stage_name
from baton.wire.v1 import common_pb2

#: Tokens that the client may have when its request is tried again: prefill's first one is sent before decode has anything. The next room
#: computes it once more, and since greedy decoding and seeded sampling repeat themselves it is the same.
MAX_REPLAYED = 1


class Attempts:
    """`room` is the one that the request is in now. Its tokens come from `take`, which moves the request on when that room fails.

    A request is tried again until more than MAX_REPLAYED tokens have come. Every attempt has a fresh room number; prompt, sampling (its seed
    included) and deadline are those of the first. The servers that failed are not tried again for this request, nor is a pair between which
    a transfer failed.
    """

    def __init__(self, order: Order, dispatcher: Dispatcher, fleet: Fleet, retries: int) -> None:
        """Opens the first room. Raises DrainingError, OverloadedError."""
        self.failed: list[FailedAttempt] = []
        self.on_failed: Callable[[], None] | None = None
        self._order = order
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._retries = retries
        self._given: list[int] = []  # the answer so far, as long as it may be replayed
        self._num_replayed = 0
        self.room = self._watched(dispatcher.dispatch(order, fitting(order.admitted, fleet.routes)))

    @property
    def count(self) -> int:
        """How many rooms the request has had."""
        return len(self.failed) + 1

    @property
    def over(self) -> bool:
        """The room has failed, and so has the request."""
        return self.room.failure is not None and not self._may_retry(self.room.failure)

    async def take(self) -> list[int]:
        """As TokenStream.take of the room in which the answer is made. Raises RoomFailedError when there is no other way left."""
        while True:
            try:
                tokens = await self.room.stream.take()
            except RoomFailedError as error:
                if not await self._again(error.failure()):
                    raise RoomFailedError(self._with_history(error.failure())) from None
                continue
            following = self._following(tokens)
            if following or not tokens:
                return following

    def _following(self, tokens: list[int]) -> list[int]:
        """Those that the client does not have yet. Raises RoomFailedError when an earlier room gave it another token in one's place."""
        if self._num_replayed == len(self._given) > MAX_REPLAYED:
            return tokens
        following = []
        for token in tokens:
            if self._num_replayed == len(self._given):
                self._given.append(token)
                following.append(token)
            elif token != self._given[self._num_replayed]:
                self._differs(token)
            self._num_replayed += 1
        return following

    def _differs(self, token: int) -> NoReturn:
        number, had = self._num_replayed, self._given[self._num_replayed]
        failure = common_pb2.Failure(
            code=code_number(grpc.StatusCode.INTERNAL),
            origin=common_pb2.ORIGIN_GATEWAY,
            cause="token_conflict",
            message=f"token number {number} was {had} on {' and '.join(self.failed[-1].servers)} and is {token} on "
            f"{' and '.join(self.room.passage.servers)}: these servers do not compute the same",
        )
        self.room.cancel(failure)
        raise RoomFailedError(self._with_history(self.room.failure or failure))

    def _watched(self, room: LiveRoom) -> LiveRoom:
        room.on_failed = self._room_failed
        room.may_leave = self._may_leave
        return room

    def _room_failed(self) -> None:
        if self.over and self.on_failed is not None:
            self.on_failed()

    # --- whether --------------------------------------------------------------------------------------------------------------

    def _may_retry(self, failure: common_pb2.Failure) -> bool:
        if max(self.room.passage.num_tokens, len(self._given)) > MAX_REPLAYED or len(self.failed) >= self._retries:
            return False
        return is_retryable(failure) and bool(self._elsewhere(failure))

    def _may_leave(self, failure: common_pb2.Failure) -> bool:
        """Whether a server that is silent is reason enough to go: only if a pair is there that answers."""
        return self._may_retry(failure) and bool(trusted(self._elsewhere(failure), time.monotonic()))

    def _elsewhere(self, failure: common_pb2.Failure) -> list[Route]:
        """Routes that can take the request and that none of its failures speaks against."""
        attempts = [*self.failed, self._attempt(failure)]
        routes = fitting(self._order.admitted, self._fleet.routes)
        return [route for route in routes if not any(attempt.excludes(route.instances) for attempt in attempts)]

    def _attempt(self, failure: common_pb2.Failure) -> FailedAttempt:
        return FailedAttempt(self.room.room, self.room.passage.servers, failure)

    # --- again ----------------------------------------------------------------------------------------------------------------

    async def _again(self, failure: common_pb2.Failure) -> bool:
        """Opens the next room; False when this failure is the request's."""
        if not self._may_retry(failure):
            return False
        pause_s = backoff_s(self.count)
        with self._dispatcher.rooms.between():
            await self.room.settled.wait()
            await asyncio.sleep(pause_s)
            routes = self._elsewhere(failure)
            if not routes or time.monotonic() >= self._order.deadline:
                return False
            attempt = self._attempt(failure)
            try:
                room = self._dispatcher.dispatch(self._order, routes, number=self.count + 1)
            except GatewayError:
                return False  # the gateway ends: the failure that the client is told is the room's
            self.failed.append(attempt)
            room.passage.first_token_at = self.room.passage.first_token_at
            self.room = self._watched(room)
            self._num_replayed = 0
        self._note(attempt, pause_s)
        return True

    def _note(self, attempt: FailedAttempt, pause_s: float) -> None:
        failure = attempt.failure
        self._dispatcher.rooms.retries[origin_name(failure.origin), stage_name(failure.stage), failure.cause] += 1
        self._order.log.warning(
            "room retried",
            room=attempt.room,
            next_room=self.room.room,
            attempt=self.count,
            origin=origin_name(failure.origin),
            stage=stage_name(failure.stage),
            cause=failure.cause,
            servers=list(attempt.servers),
            next_servers=list(self.room.passage.servers),
            backoff_ms=round(pause_s * 1e3),
        )
        self._order.span.add_event("RETRIED", {"baton.attempt": self.count, "baton.cause": failure.cause})

    def _with_history(self, failure: common_pb2.Failure) -> common_pb2.Failure:
        if not self.failed:
            return failure
        told = common_pb2.Failure()
        told.CopyFrom(failure)
        told.message += f"; attempt {self.count} of at most {self._retries + 1}, after " + ", ".join(attempt.why() for attempt in self.failed)
        return told
