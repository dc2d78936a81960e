"""The rooms of one request, one after the other: a server's failure is answered by other servers, and the client's stream goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.gateway.admission import Admitted, fitting
from baton.gateway.continuation import continued, ended_by, weights_of
from baton.gateway.dispatch import Dispatcher, Order
from baton.gateway.errors import GatewayError, RoomFailedError
from baton.gateway.fleet import Fleet, Route, trusted
from baton.gateway.live_room import LiveRoom
from baton.gateway.local_prefill import local_routes
from baton.gateway.retry import FailedAttempt, RetryPolicy, backoff_s, is_overload, is_way_lost
from baton.wire.status import origin_name, stage_name
from baton.wire.v1 import common_pb2, inference_pb2

#: How long a request waits for the new way between the two servers whose way broke, where no others can take it, and how often it looks.
NEW_WAY_WAIT_S = 5.0
NEW_WAY_LOOK_S = 0.02

#: Causes of failures that are the request's grammar's.
_OF_GRAMMARS = ("grammar_invalid", "grammar_fault")


class Attempts:
    """`room` is the one that the request is in now. Its tokens come from `take`, which moves the request on when that room fails.

    Every attempt has a fresh room number and goes on behind the tokens that the client has: prompt and answer so far are its prompt, seed and
    deadline those of the first. The servers that failed are not tried again for this request, nor is a pair between which a transfer failed
    (but where only its way broke, which is laid anew), nor one with other weights once there are tokens. Under policy "recompute" that works at
    any token, and where only the transfer failed, the same decode server computes what it should have been sent.
    """

    def __init__(self, order: Order, dispatcher: Dispatcher, fleet: Fleet, policy: RetryPolicy, *, fork_of: LiveRoom | None = None) -> None:
        """Opens the first room; where `fork_of` is given, on its servers and behind its prompt. Raises DrainingError, OverloadedError."""
        self.failed: list[FailedAttempt] = []
        self.on_failed: Callable[[], None] | None = None
        #: Tokens of prompt and answer that rooms after the first one were given to compute again.
        self.num_recomputed = 0
        #: Of the prompt's tokens behind the first, where they were asked for and a token has been taken.
        self.prompt_logprobs: Sequence[inference_pb2.TokenLogprobs] = ()
        self._order = order
        self._wants_logprobs = order.admitted.sampling.HasField("top_logprobs")
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._policy = policy
        self._given: list[int] = []  # the answer so far
        first = dispatcher.dispatch(order, fitting(order.admitted, fleet.routes)) if fork_of is None else dispatcher.fork(order, fork_of)
        self._first = first
        self.room = self._watched(first)

    @property
    def count(self) -> int:
        """How many rooms the request has had."""
        return len(self.failed) + 1

    @property
    def asks_of_prompt(self) -> bool:
        """Whether `prompt_logprobs` will have something."""
        return self._order.admitted.sampling.HasField("prompt_logprobs")

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those that whoever computed it first had in a prefix cache."""
        return min(self._first.passage.cached_tokens, len(self._order.admitted.prompt))

    @property
    def over(self) -> bool:
        """The room has failed, and so has the request."""
        return self.room.failure is not None and not self._may_go_on(self.room.failure)

    async def take(self) -> list[int]:
        """As TokenStream.take of the room in which the answer is made. Raises RoomFailedError when there is no other way left."""
        while True:
            try:
                tokens = await self.room.answer.stream.take()
            except RoomFailedError as error:
                if not await self._again(error.failure()):
                    raise self._blaming(self._with_history(error.failure())) from None
                continue
            if not self._given:
                self.prompt_logprobs = self.room.answer.prompt_logprobs
            self._given += tokens
            return tokens

    def take_logprobs(self) -> list[inference_pb2.TokenLogprobs]:
        """Of the tokens that `take` has returned since the last call, where the request asked for them."""
        if not self._wants_logprobs:
            return []
        known = self.room.answer.logprobs
        return [known.pop(index) for index in sorted(known) if index < len(self._given) - self._before]

    def close(self) -> None:
        """Nobody is to hear any more that its room has failed; whatever runs of it goes on. They hold each other until then."""
        self.on_failed = None
        self._let_go()

    def _let_go(self) -> None:
        self.room.on_failed = self.room.may_leave = None

    def _watched(self, room: LiveRoom) -> LiveRoom:
        self._weights = weights_of(room.servers[-1])
        self._before = len(self._given)  # tokens of rooms before this one
        room.on_failed = self._room_failed
        room.may_leave = self._may_leave
        return room

    def _room_failed(self) -> None:
        if self.over and self.on_failed is not None:
            self.on_failed()

    # --- whether and where ----------------------------------------------------------------------------------------------------

    def _may_go_on(self, failure: common_pb2.Failure) -> bool:
        if ended_by(self._order.admitted.sampling, self._given) is not None:
            return False
        if not self._policy.allows(failure, len(self.failed), self.room.passage.num_tokens):
            return False
        return bool(self._elsewhere(failure)) or self._awaits_new_way(failure)

    def _awaits_new_way(self, failure: common_pb2.Failure) -> bool:
        """Whether the room's own servers are there and lay a new way between them."""
        instances = self.room.passage.servers
        return is_way_lost(failure) and all(worker.is_well(instance) for worker, instance in zip(self.room.servers, instances, strict=True))

    def _may_leave(self, failure: common_pb2.Failure) -> bool:
        """Whether a server that is silent is reason enough to go: only if others are there that answer."""
        return self._may_go_on(failure) and bool(trusted(self._elsewhere(failure), time.monotonic()))

    def _elsewhere(self, failure: common_pb2.Failure) -> list[Route]:
        """Routes that can take what is left of the request and that none of its failures speaks against; the best kind of them."""
        if not self._policy.recomputes:
            return self._open_to(self._fleet.routes, failure)
        alone = self._open_to(local_routes(self._fleet.workers), failure)
        if self._attempt(failure).only_transfer_failed:
            same = [route for route in alone if route.instances[0] == self.room.passage.decode_instance]
            if trusted(same, time.monotonic()):
                return same
        # What overloaded prefill servers do not take is no work for decode servers.
        return self._open_to(self._fleet.routes, failure) or ([] if is_overload(failure) else alone)

    def _open_to(self, routes: Sequence[Route], failure: common_pb2.Failure) -> list[Route]:
        attempts = [*self.failed, self._attempt(failure)]
        fit = [route for route in fitting(self._rest(), routes) if not any(attempt.excludes(route.instances) for attempt in attempts)]
        if not self.room.passage.num_tokens:
            return fit
        return [route for route in fit if weights_of(route.servers[-1]) == self._weights]

    def _rest(self) -> Admitted:
        return continued(self._order.admitted, self._given)

    def _attempt(self, failure: common_pb2.Failure) -> FailedAttempt:
        passage = self.room.passage
        return FailedAttempt(self.room.room, passage.servers, failure, passage.num_tokens, passage.prefilled_on_decode, self.room.is_hearsay)

    # --- again ----------------------------------------------------------------------------------------------------------------

    async def _again(self, failure: common_pb2.Failure) -> bool:
        """Opens the next room; False when this failure is the request's."""
        if not self._may_go_on(failure):
            return False
        pause_s = backoff_s(self.count)
        with self._dispatcher.rooms.between():
            await self.room.settled.wait()
            await asyncio.sleep(pause_s)
            routes = await self._routes_after(failure)
            if not routes or time.monotonic() >= self._order.deadline:
                return False
            attempt = self._attempt(failure)
            rest = self._rest()
            try:
                room = self._dispatcher.dispatch(replace(self._order, admitted=rest), routes, number=self.count + 1, follows=self.room.passage)
            except GatewayError:
                return False  # the gateway ends: the failure that the client is told is the room's
            self.failed.append(attempt)
            self._let_go()
            self.num_recomputed += len(rest.prompt)
            self.room = self._watched(room)
        self._note(attempt, len(rest.prompt), pause_s)
        return True

    async def _routes_after(self, failure: common_pb2.Failure) -> list[Route]:
        until = min(time.monotonic() + NEW_WAY_WAIT_S, self._order.deadline)
        while not (routes := self._elsewhere(failure)) and self._awaits_new_way(failure) and time.monotonic() < until:  # noqa: ASYNC110 # rare and short
            await asyncio.sleep(NEW_WAY_LOOK_S)
        return routes

    def _note(self, attempt: FailedAttempt, num_recomputed: int, pause_s: float) -> None:
        failure = attempt.failure
        rooms = self._dispatcher.rooms
        rooms.retries[origin_name(failure.origin), stage_name(failure.stage), failure.cause] += 1
        rooms.counters["recomputed_tokens"] += num_recomputed
        if attempt.tokens_sent:
            rooms.counters["streams_continued"] += 1
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
            next_on_decode_alone=self.room.passage.prefilled_on_decode,
            tokens_sent=attempt.tokens_sent,
            recomputed_tokens=num_recomputed,
            backoff_ms=round(pause_s * 1e3),
        )
        self._order.span.add_event("RETRIED", {"baton.attempt": self.count, "baton.cause": failure.cause, "baton.tokens_sent": attempt.tokens_sent})

    def _blaming(self, failure: common_pb2.Failure) -> RoomFailedError:
        """With the field that is at fault, where a server found out that a grammar is."""
        field = self._order.admitted.structure_field
        if not field or failure.cause not in _OF_GRAMMARS:
            return RoomFailedError(failure)
        told = common_pb2.Failure()
        told.CopyFrom(failure)
        told.message = f"{field}: {failure.message}"
        return RoomFailedError(told, field)

    def _with_history(self, failure: common_pb2.Failure) -> common_pb2.Failure:
        if not self.failed:
            return failure
        told = common_pb2.Failure()
        told.CopyFrom(failure)
        told.message += f"; attempt {self.count} of at most {self._policy.retries + 1}, after " + ", ".join(one.why() for one in self.failed)
        return told
