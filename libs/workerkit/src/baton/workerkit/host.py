"""The engine's thread: commands in, batches of events out, nothing else shared.

The loop sleeps until somebody wakes it (a command, or a port that has something to tell) and steps as long as there is work. It never waits
for a peer and never touches the network; the RPC front runs elsewhere and may stall without stopping a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.engine.step_time import ADMIT, COMMIT, DELIVER, StepTime
from baton.engine.types import EngineEvent, EngineStats, Failure, Request, Token
from baton.servicekit import get_logger
from baton.workerkit.errors import HostStoppedError

log = get_logger(__name__)

Command = Callable[[], None]

#: How old the engine's counts may be while it is busy, and nothing but tokens came of its steps.
STATS_PERIOD_S = 0.1


class HostedEngine(Protocol):
    """What the host asks of an engine. Every method but `give_up` is called from the host's thread only."""

    def add(self, request: Request) -> None: ...

    def give_up(self, room: int, failure: Failure) -> None: ...

    def abort(self, room: int, failure: Failure) -> None: ...

    def step(self) -> list[EngineEvent]: ...

    def on_milestones(self, tell: Callable[[list[EngineEvent]], None]) -> None: ...

    def on_wait(self, is_woken: Callable[[], bool]) -> None: ...

    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step, or its part before and between the layers, produced. `at`: time.monotonic() when it was done."""

    events: list[EngineEvent]
    at: float


@dataclass(slots=True)
class Pulse:
    """When the engine last made progress, as the host saw it; written by the engine's thread, read by anyone.

    busy: there is work that a step could do, or a step is running.
    """

    last_progress: float = field(default_factory=time.monotonic)
    busy: bool = False

    def stalled_s(self, now: float) -> float:
        """Seconds without progress while there was work; 0 when idle."""
        return max(0.0, now - self.last_progress) if self.busy else 0.0


class EngineHost:
    """Owns the engine's thread. `submit`, `abort` and `wake` may be called from any thread and return at once.

    step_time: the engine's, to which the host adds what it does around a step.
    """

    def __init__(self, engine: HostedEngine, *, name: str = "engine", step_time: StepTime | None = None) -> None:
        self._engine = engine
        self._step_time = step_time or StepTime()
        self._commands: deque[Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._deliver: Callable[[Batch], None] = lambda batch: None
        self._on_failure: Callable[[BaseException], None] = lambda error: None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.pulse = Pulse()
        self.stats = engine.stats()
        self.error: BaseException | None = None
        self._refreshed = 0.0

    def start(self, deliver: Callable[[Batch], None], on_failure: Callable[[BaseException], None]) -> None:
        """Starts the thread. `deliver` gets every batch and `on_failure` the exception that ended the engine; both run on the engine's thread."""
        self._deliver = deliver
        self._on_failure = on_failure
        self._engine.on_milestones(self._tell)
        self._engine.on_wait(self._wake.is_set)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine can take commands."""
        return self._thread.is_alive() and self.error is None

    def submit(self, request: Request) -> None:
        """Hands a request over. Raises HostStoppedError when the engine is gone."""
        self._command(lambda: self._engine.add(request))

    def abort(self, room: int, failure: Failure) -> None:
        """Asks the engine to end a room; its Failed event says when it did. Raises HostStoppedError when the engine is gone.

        A step that runs takes no commands; it is told beside them, and does not go on for nobody."""
        self._engine.give_up(room, failure)
        self._command(lambda: self._engine.abort(room, failure))

    def between_steps(self, command: Command) -> None:
        """Runs `command` on the engine's thread, soon. Raises HostStoppedError when the engine is gone."""
        self._command(command)

    def wake(self) -> None:
        """Makes the loop look at its ports again: what they are given as `on_wake`."""
        self._wake.set()

    def stop(self) -> None:
        """Ends the loop after the current step and joins the thread: blocks for a step. Idempotent. Rooms that are open stay as they are."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _tell(self, events: list[EngineEvent]) -> None:
        now = time.monotonic()
        self.pulse.last_progress = now
        self._deliver(Batch(events, now))

    def _command(self, command: Command) -> None:
        if self.error is not None or self._stopping:
            raise HostStoppedError("the engine has stopped" if self.error is None else f"the engine has failed: {self.error!r}")
        self._commands.append(command)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self.error = error
            self.pulse.busy = False
            self._on_failure(error)
            log.exception("engine failed", error=repr(error))

    def _turn(self) -> None:
        if not self._engine.has_work():
            self._refresh(time.monotonic())
            self.pulse.busy = starved(self.stats)
            self._wake.wait()
        self._wake.clear()
        if not self.pulse.busy:
            self.pulse.last_progress = time.monotonic()
            self.pulse.busy = True
        self._step_time.skip()
        while self._commands:
            self._commands.popleft()()
        self._step_time.lap(ADMIT)
        events = self._engine.step()
        now = time.monotonic()
        if now - self._refreshed >= STATS_PERIOD_S or any(type(event) is not Token for event in events):
            self._refresh(now)
        self._step_time.lap(COMMIT)
        if events:
            self.pulse.last_progress = now
            self._deliver(Batch(events, now))
            self._step_time.lap(DELIVER)

    def _refresh(self, now: float) -> None:
        """Takes a snapshot of the engine's counts: they cost a walk over its rooms, so not after every step."""
        steps = self.stats.steps
        self.stats = self._engine.stats()
        self._refreshed = now
        if self.stats.steps != steps:
            self.pulse.last_progress = now


def starved(stats: EngineStats) -> bool:
    """Rooms wait for pages that nothing which runs or moves will give back: only a quarantine that ends, or an abort, can help."""
    return bool(stats.waiting and not stats.running and not stats.reserved_pages and not stats.published_pages and stats.quarantined_pages)
