"""Where the host's part of a step goes, as the engine's thread sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

#: Of a step. admit: commands that came, and what the port has to tell (rooms that have landed). schedule: the plan, and taking it over. launch: one
#: forward pass, on a CPU with its computing. wait: for the device. commit: what was drawn becomes events. deliver: they go to the front's thread.
PARTS = ("admit", "schedule", "launch", "wait", "commit", "deliver")
ADMIT, SCHEDULE, LAUNCH, WAIT, COMMIT, DELIVER = range(len(PARTS))


class StepTime:
    """Used on the engine's thread only. A lap is a look at the clock and an addition."""

    __slots__ = ("_mark", "_spent", "_tell")

    def __init__(self) -> None:
        self._mark = 0.0
        self._spent = [0.0] * len(PARTS)
        self._tell: Callable[[Sequence[float], float | None], None] | None = None

    def on_step(self, tell: Callable[[Sequence[float], float | None], None]) -> None:
        """`tell` gets, of each step that was read, the seconds of each of PARTS since the one before, and how long the device stood still between
        the two decode steps; None where that is not known. It returns at once."""
        self._tell = tell

    @property
    def is_told(self) -> bool:
        return self._tell is not None

    def skip(self) -> None:
        """What was since the last lap is no part of a step."""
        self._mark = time.perf_counter()

    def lap(self, part: int) -> None:
        """What was since the last lap is of `part`."""
        now = time.perf_counter()
        self._spent[part] += now - self._mark
        self._mark = now

    def end(self, idle_s: float | None) -> None:
        """A step was read."""
        if self._tell is not None:
            self._tell(self._spent, idle_s)
        self._spent = [0.0] * len(PARTS)
