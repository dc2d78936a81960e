"""How long a room may stay in each state and its request altogether: two timers that the room owns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.gateway.room import State


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a room may spend in each state."""

    bootstrap_s: float
    waiting_s: float
    transfer_s: float

    def of(self, state: State) -> tuple[str, float] | None:
        """(name, seconds); None: only the request's deadline counts."""
        if self is UNLIMITED:
            return None
        names = {
            State.BOOTSTRAPPING: ("bootstrap_timeout", self.bootstrap_s),
            State.WAITING: ("waiting_timeout", self.waiting_s),
            State.TRANSFERRING: ("transfer_timeout", self.transfer_s),
        }
        return names.get(state)


#: Of a room that waits for another one: that one's limits count.
UNLIMITED = Timeouts(0.0, 0.0, 0.0)


class RoomClock:
    """One timer for the state, replaced when the state changes, and one for the deadline. Call it on the event loop, and `close` it."""

    def __init__(
        self, timeouts: Timeouts, deadline: float | None, *, on_state_timeout: Callable[[str, float], None], on_deadline: Callable[[], None]
    ) -> None:
        """deadline: time.monotonic(), seconds. on_state_timeout: gets the limit's name and its seconds."""
        self._timeouts = timeouts
        self._deadline = deadline
        self._on_state_timeout = on_state_timeout
        self._on_deadline = on_deadline
        self._state_timer: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None

    def start(self, state: State) -> None:
        """The room begins in `state`."""
        if self._deadline is not None:
            left_s = max(0.0, self._deadline - time.monotonic())
            self._deadline_timer = asyncio.get_running_loop().call_later(left_s, self._on_deadline)
        self.enter(state)

    def enter(self, state: State) -> None:
        """The room is in another state now."""
        limit = self._timeouts.of(state)
        self._replace(None if limit is None else (limit[1], lambda: self._on_state_timeout(*limit)))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """The answer is there: no limit counts any more, only what is done `delay_s` from now."""
        self.stop()
        self._replace((delay_s, act))

    def stop(self) -> None:
        """Idempotent."""
        self._replace(None)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None

    def close(self) -> None:
        """Stops for good and lets go of whom it would tell, who holds this clock."""
        self.stop()
        self._on_state_timeout = self._on_deadline = _nobody

    def _replace(self, following: tuple[float, Callable[[], None]] | None) -> None:
        if self._state_timer is not None:
            self._state_timer.cancel()
        self._state_timer = None if following is None else asyncio.get_running_loop().call_later(*following)


def _nobody(*_: object) -> None:
    """Whom a closed clock tells."""
