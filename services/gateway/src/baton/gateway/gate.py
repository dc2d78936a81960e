"""The queue before the rooms: bounded, fair between keys, on the request's own deadline."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from baton.gateway.callers import Caller
from baton.gateway.errors import DrainingError, OverloadedError, QueueDeadlineError, QueueTimeoutError
from baton.gateway.fair_queue import FairQueue, Waiting

#: From how many of the last turns the speed of the queue is told, and the longest that a client is told to wait.
SPEED_SAMPLES = 64
MAX_RETRY_AFTER_S = 60

#: What one unit of a request's priority is worth, in seconds of waiting: nobody waits for ever behind others' priorities, which are bounded.
PRIORITY_S = 1.0
MAX_PRIORITY = 100


class Places(Protocol):
    """The rooms, as far as the gate sees them."""

    draining: bool

    @property
    def free(self) -> int: ...

    @property
    def max_rooms(self) -> int: ...


@dataclass(eq=False, slots=True)
class Turn:
    """One request's place in the queue: `let_in` is done when its turn has come."""

    let_in: asyncio.Future[None]
    num_rooms: int


class Gate:
    """Lets as many requests on as there are places for rooms; the others wait, in fair order. Lives on one event loop.

    counters: "queued", "let_in" (of those queued), "left" (the client went), "queue_timeout", "queue_deadline", "queue_full".
    """

    def __init__(self, places: Places, *, max_queue: int, queue_timeout_s: float) -> None:
        """`room_freed` is to be called whenever `places.free` may have grown."""
        self._places = places
        self._max_queue = max_queue
        self._queue_timeout_s = queue_timeout_s
        self._queue: FairQueue[Turn] = FairQueue()
        #: Rooms of requests that were let in and have not opened them yet.
        self._num_entering = 0
        self._turns: deque[float] = deque(maxlen=SPEED_SAMPLES)
        self.counters: Counter[str] = Counter()

    @property
    def max_rooms(self) -> int:
        """More than these no request can be let in with."""
        return self._places.max_rooms

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def check(self, num_rooms: int = 1) -> None:
        """Before work is done for a request that would be refused. Raises DrainingError, OverloadedError."""
        if self._places.draining:
            raise DrainingError
        if not self._has_place(num_rooms) and len(self._queue) >= self._max_queue:
            self.counters["queue_full"] += 1
            waiting = f" and {len(self._queue)} wait, the limit is {self._max_queue} (--max-queue)" if self._max_queue else ""
            limit = self._places.max_rooms
            more = f", this one needs {num_rooms} places" if num_rooms > 1 else ""
            text = f"{limit - self._places.free} requests are open{more}, the limit is {limit} (--max-rooms){waiting}: try again later"
            raise OverloadedError(text, self._retry_after_s())

    @contextlib.asynccontextmanager
    async def place(self, caller: Caller, cost: int, deadline: float, num_rooms: int = 1, priority: int = 0) -> AsyncIterator[float]:
        """Waits for places; whoever opens `num_rooms` (at most `max_rooms`) inside of the block has them. Yields the seconds waited.

        cost: tokens of the prompt. deadline: the request's, time.monotonic(), seconds. priority: among its caller's, it waits as if it had come so
        many PRIORITY_S later. Leaving while it waits gives the place in the queue up.
        Raises DrainingError, OverloadedError; QueueTimeoutError, QueueDeadlineError after a wait.
        """
        began = time.monotonic()
        self.check(num_rooms)
        if self._has_place(num_rooms):
            self._num_entering += num_rooms
        else:
            turn = Turn(asyncio.get_running_loop().create_future(), num_rooms)
            await self._wait(turn, self._queue.push(caller.key_id, cost, caller.limits.weight, turn, began + PRIORITY_S * priority), deadline, began)
        try:
            yield time.monotonic() - began
        finally:
            self._num_entering -= num_rooms
            self.room_freed()

    def room_freed(self) -> None:
        """Lets in whoever is next, as far as there is room: who needs several rooms is not overtaken by who needs fewer."""
        while self._queue and not self._places.draining and self._places.free >= self._num_entering + self._queue.peek().num_rooms:
            turn = self._queue.pop()
            if not turn.let_in.done():
                turn.let_in.set_result(None)
                self._num_entering += turn.num_rooms
                self._turns.append(time.monotonic())
                self.counters["let_in"] += 1

    def drain(self) -> None:
        """Sends everybody who waits to another gateway."""
        while self._queue:
            turn = self._queue.pop().let_in
            if not turn.done():
                turn.set_exception(DrainingError())

    def _has_place(self, num_rooms: int) -> bool:
        """Nobody overtakes those who wait."""
        return not self._queue and self._places.free >= self._num_entering + num_rooms

    async def _wait(self, turn: Turn, waiting: Waiting[Turn], deadline: float, began: float) -> None:
        self.counters["queued"] += 1
        until = min(deadline, began + self._queue_timeout_s)
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                await turn.let_in
        except TimeoutError:
            self._give_up(waiting, turn)
            raise self._late(began, deadline) from None
        except asyncio.CancelledError:
            self.counters["left"] += 1
            self._give_up(waiting, turn)
            raise

    def _give_up(self, waiting: Waiting[Turn], turn: Turn) -> None:
        """Its turn may have come in the very moment in which it left: the place goes to the next. So may that of those whom it kept waiting."""
        let_in = turn.let_in
        if not self._queue.remove(waiting) and let_in.done() and not let_in.cancelled() and let_in.exception() is None:
            self._num_entering -= turn.num_rooms
        self.room_freed()

    def _late(self, began: float, deadline: float) -> QueueTimeoutError | QueueDeadlineError:
        waited_s = time.monotonic() - began
        if began + self._queue_timeout_s < deadline:
            self.counters["queue_timeout"] += 1
            text = f"no place was free within {self._queue_timeout_s:g} s (--queue-timeout-s); {len(self._queue)} others wait: try again later"
            return QueueTimeoutError(text, self._retry_after_s())
        self.counters["queue_deadline"] += 1
        return QueueDeadlineError(f"the request's deadline passed while it waited for a place, {waited_s:.3f} s; {len(self._queue)} others wait")

    def _retry_after_s(self) -> int:
        """How long those who wait now will take, at the speed of the last turns."""
        if len(self._turns) < 2:
            return 1
        per_turn_s = (time.monotonic() - self._turns[0]) / len(self._turns)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(len(self._queue) * per_turn_s)))
