"""The engine's thread: wakes when asked, sleeps when idle, shows whether it makes progress."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from baton.engine.types import Failure, Request, SamplingParams, Token
from baton.workerkit import EngineHost, HostStoppedError, ProgressWatch


def request(room: int, max_tokens: int = 2) -> Request:
    return Request(room, [1], SamplingParams(max_tokens=max_tokens))


@pytest.fixture
def started(engine):
    host = EngineHost(engine)
    batches, done = [], threading.Event()

    def deliver(batch) -> None:
        batches.append(batch)
        if not engine.requests:
            done.set()

    host.start(deliver, lambda error: done.set())
    yield host, batches, done
    engine.hang.set()
    host.stop()
    host.stop()


def test_one_batch_a_step(engine, started) -> None:
    host, batches, done = started
    host.submit(request(1, max_tokens=3))
    assert done.wait(5)
    tokens = [[event.token for event in batch.events if isinstance(event, Token)] for batch in batches]
    assert [t for t in tokens if t] == [[100], [101], [102]]


def test_an_idle_engine_is_not_stepped(engine, started) -> None:
    host, _, done = started
    host.submit(request(1))
    assert done.wait(5)
    time.sleep(0.05)
    turns = engine.turns
    time.sleep(0.2)
    assert engine.turns == turns
    host.wake()
    deadline = time.monotonic() + 5
    while engine.turns == turns:
        assert time.monotonic() < deadline


def test_an_engine_that_waits_hears_that_a_command_has_come(engine, started) -> None:
    host, _, done = started
    engine.hang.clear()
    host.submit(request(1))
    deadline = time.monotonic() + 5
    while not engine.turns:
        assert time.monotonic() < deadline
    assert not engine.is_woken()
    host.abort(1, Failure("CANCELLED", "client", "cancelled", "gone"))
    assert engine.is_woken()
    engine.hang.set()
    assert done.wait(5)


def test_commands_from_many_threads_are_not_lost(engine, started) -> None:
    host, _, _ = started
    threads = [threading.Thread(target=lambda base=base: [host.submit(request(base + i)) for i in range(200)]) for base in range(0, 2000, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 10
    while len(engine.sent) < 2000 or engine.requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_step_that_runs_is_told_of_a_room_that_ends(engine, started) -> None:
    """The command waits for the step; the word that its room is given up does not."""
    host, _, done = started
    gone = Failure("CANCELLED", "client", "client_gone", "the client left")
    engine.hang.clear()
    host.submit(request(1, max_tokens=1000))
    deadline = time.monotonic() + 10
    while not (engine.turns and engine.requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    host.abort(1, gone)
    assert (engine.given_up, engine.aborted) == ([(1, gone)], [])
    engine.hang.set()
    assert done.wait(10)
    assert engine.aborted == [(1, gone)]


def test_a_stopped_host_says_so(engine, started) -> None:
    host, _, _ = started
    host.stop()
    with pytest.raises(HostStoppedError):
        host.submit(request(1))
    with pytest.raises(HostStoppedError):
        host.abort(1, Failure("CANCELLED", "client", "x", "y"))


def test_a_stall_is_seen_and_idleness_is_none(engine, started) -> None:
    host, _, _ = started
    assert host.pulse.stalled_s(time.monotonic() + 1000) == 0
    engine.hang.clear()
    host.submit(request(1))
    deadline = time.monotonic() + 5
    while host.pulse.stalled_s(time.monotonic()) < 0.2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.hang.set()
    while host.pulse.stalled_s(time.monotonic() + 1000) != 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_health_follows_progress(engine, started, eventually) -> None:
    host, _, _ = started
    verdicts: list[bool] = []

    async def set_serving(serving: bool) -> None:
        verdicts.append(serving)

    watch = asyncio.create_task(ProgressWatch(host, set_serving, stall_limit_s=0.2).run())
    await asyncio.sleep(0.4)
    assert verdicts == []
    engine.hang.clear()
    host.submit(request(1))
    await eventually(lambda: verdicts == [False])
    engine.hang.set()
    await eventually(lambda: verdicts == [False, True])
    engine.break_with = ValueError("broken")
    host.wake()
    await eventually(lambda: verdicts == [False, True, False])
    watch.cancel()


async def test_health_follows_an_obstacle_that_the_service_names(started, eventually) -> None:
    host, _, _ = started
    verdicts: list[bool] = []
    obstacles = ["no inbox can be opened"]

    async def set_serving(serving: bool) -> None:
        verdicts.append(serving)

    watch = asyncio.create_task(ProgressWatch(host, set_serving, stall_limit_s=0.2, obstacle=lambda: "".join(obstacles)).run())
    await eventually(lambda: verdicts == [False])
    obstacles.clear()
    await eventually(lambda: verdicts == [False, True])
    watch.cancel()


async def test_a_pool_that_quarantine_holds_is_no_progress(engine, started, eventually) -> None:
    """Nothing to compute, and nothing that runs will give pages back: idle by the engine's word, stuck all the same."""
    host, _, _ = started
    engine.quarantined = True
    engine.hold = True
    host.submit(request(1))
    await eventually(lambda: host.pulse.stalled_s(time.monotonic()) > 0.1)
    engine.quarantined = False
    host.wake()
    await eventually(lambda: host.pulse.stalled_s(time.monotonic() + 100) == 0)
