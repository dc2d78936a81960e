"""The queue before the rooms, alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import pytest
from gateway_harness import eventually

from baton.gateway.callers import ANONYMOUS, Caller
from baton.gateway.errors import DrainingError, GatewayError, OverloadedError, QueueDeadlineError, QueueTimeoutError
from baton.gateway.gate import Gate
from baton.servicekit import KeyLimits


class Rooms:
    """Places as the room table has them."""

    def __init__(self, max_rooms: int) -> None:
        self.max_rooms = max_rooms
        self.num_open = 0
        self.draining = False

    @property
    def free(self) -> int:
        return self.max_rooms - self.num_open


class Hall:
    """A gate, its rooms, and requests that pass through."""

    def __init__(self, max_rooms: int = 1, max_queue: int = 10, queue_timeout_s: float = 30.0) -> None:
        self.rooms = Rooms(max_rooms)
        self.gate = Gate(self.rooms, max_queue=max_queue, queue_timeout_s=queue_timeout_s)
        self.entered: list[str] = []

    async def enter(self, name: str = "", cost: int = 1, deadline_s: float = 30.0, priority: int = 0) -> float:
        async with self.gate.place(Caller(name.rstrip("!"), KeyLimits()), cost, time.monotonic() + deadline_s, priority=priority) as waited_s:
            self.rooms.num_open += 1
            self.entered.append(name)
        return waited_s

    def leave(self) -> None:
        self.rooms.num_open -= 1
        self.gate.room_freed()

    async def queue(self, *names: str) -> list[asyncio.Task[float]]:
        tasks = []
        for name in names:
            before = self.gate.num_waiting
            tasks.append(asyncio.create_task(self.enter(name)))
            await eventually(lambda before=before: self.gate.num_waiting == before + 1)
        return tasks


async def test_whoever_comes_first_goes_first_and_nobody_overtakes() -> None:
    hall = Hall()
    assert await hall.enter("x") < 1
    tasks = await hall.queue("x", "x")
    hall.rooms.num_open = 0  # a place is free and nobody was told yet: the next to come must not take it
    late = asyncio.create_task(hall.enter("late"))
    await eventually(lambda: hall.gate.num_waiting == 3)
    hall.rooms.num_open = 1
    for _ in range(3):
        hall.leave()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, late)
    assert hall.rooms.num_open == 1


async def test_keys_take_turns() -> None:
    hall = Hall()
    await hall.enter("first")
    tasks = await hall.queue("flood", "flood", "flood", "flood", "other")
    for _ in tasks:
        before = len(hall.entered)
        hall.leave()
        await eventually(lambda before=before: len(hall.entered) == before + 1)
    assert hall.entered.index("other") <= 2
    await asyncio.gather(*tasks)


async def test_a_full_queue_says_how_long_it_takes() -> None:
    hall = Hall(max_queue=2)
    await hall.enter()
    tasks = await hall.queue("", "")
    with pytest.raises(OverloadedError, match=r"1 requests are open, the limit is 1 \(--max-rooms\) and 2 wait, the limit is 2 \(--max-queue\)"):
        await hall.enter()
    hall.gate._turns.extend([time.monotonic() - 20, time.monotonic()])
    with pytest.raises(OverloadedError) as caught:
        hall.gate.check()
    assert 20 <= caught.value.retry_after_s <= 22  # two wait, ten seconds a turn
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert hall.gate.counters["queue_full"] == 2


async def test_without_a_queue_nobody_waits_for_several_places_either() -> None:
    """Who did would keep everybody else out, who would be told that the gateway is full while it is not."""
    hall = Hall(max_rooms=4, max_queue=0)
    await hall.enter("first")
    with pytest.raises(OverloadedError, match="1 requests are open, this one needs 4 places, the limit is 4 "):
        async with hall.gate.place(ANONYMOUS, 1, time.monotonic() + 0.2, num_rooms=4):
            pass
    await hall.enter("second")
    assert hall.entered == ["first", "second"]


async def test_who_leaves_frees_the_place_in_the_queue() -> None:
    hall = Hall(max_queue=1)
    await hall.enter()
    (task,) = await hall.queue("gone")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (hall.gate.num_waiting, hall.gate.counters["left"]) == (0, 1)
    (other,) = await hall.queue("other")
    hall.leave()
    await other
    assert hall.entered == ["", "other"]


async def test_who_leaves_in_the_moment_of_its_turn_passes_it_on() -> None:
    hall = Hall()
    await hall.enter()
    gone, other = await hall.queue("gone", "other")
    hall.leave()  # it is gone's turn, and before it runs ...
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await other
    assert hall.entered == ["", "other"]
    assert hall.gate._num_entering == 0


async def test_an_error_inside_gives_the_place_back() -> None:
    hall = Hall()
    with pytest.raises(ZeroDivisionError):
        async with hall.gate.place(ANONYMOUS, 1, time.monotonic() + 10):
            raise ZeroDivisionError
    await hall.enter()


async def test_the_wait_counts_against_the_deadline_and_has_a_limit_of_its_own() -> None:
    hall = Hall(queue_timeout_s=0.1)
    await hall.enter()
    with pytest.raises(QueueTimeoutError, match=r"--queue-timeout-s"):
        await hall.enter()
    with pytest.raises(QueueDeadlineError, match="deadline passed while it waited"):
        await hall.enter(deadline_s=0.01)
    with pytest.raises(QueueDeadlineError):
        await hall.enter(deadline_s=-1)
    assert hall.gate.num_waiting == 0
    assert hall.gate.counters == {"queued": 3, "queue_timeout": 1, "queue_deadline": 2}


async def test_a_drain_sends_everybody_on() -> None:
    hall = Hall()
    await hall.enter()
    tasks = await hall.queue("a", "b")
    hall.rooms.draining = True
    hall.gate.drain()
    assert [type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == [DrainingError] * 2
    with pytest.raises(DrainingError):
        await hall.enter()


async def test_whatever_happens_places_are_neither_lost_nor_lent_twice() -> None:
    random.seed(11)
    hall = Hall(max_rooms=3, max_queue=20)
    tasks: list[asyncio.Task[Any]] = []

    async def one() -> None:
        with contextlib.suppress(GatewayError):
            await hall.enter(random.choice("abc"), random.randrange(1, 100), random.choice([0.0, 0.002, 5.0]))
            try:
                assert hall.rooms.num_open <= 3
                await asyncio.sleep(random.random() * 0.002)
            finally:
                hall.leave()

    for _ in range(1500):
        tasks.append(asyncio.create_task(one()))
        if random.random() < 0.3:
            random.choice(tasks[-20:]).cancel()
        if random.random() < 0.4:
            await asyncio.sleep(random.random() * 0.001)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [end for end in ends if isinstance(end, Exception)]
    assert (hall.rooms.num_open, hall.gate.num_waiting, hall.gate._num_entering) == (0, 0, 0)
    assert hall.gate.counters["let_in"] > 50
    assert hall.gate.counters["left"] > 5


async def test_among_a_keys_own_the_lower_priority_is_first() -> None:
    """Another key's request keeps its turn, whatever the priority of others."""
    hall = Hall()
    await hall.enter("a")
    tasks = []
    for name, priority in (("a", 0), ("b", 50), ("a!", -50), ("a", 0)):
        tasks.append(asyncio.create_task(hall.enter(name, cost=100, priority=priority)))
        await asyncio.sleep(0)
    for _ in range(4):
        hall.leave()
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    assert hall.entered == ["a", "b", "a!", "a", "a"]
