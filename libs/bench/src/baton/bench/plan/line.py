"""Who waits for pages: first come first served, with bounded overtaking, as the engine's admission has it."""

from collections.abc import Callable

from baton.bench.plan.job import Job

#: How far behind a blocked head a smaller request is looked for.
WINDOW = 64


class Line:
    """A head that does not fit may be passed by those that do, `max_passes` times; then all wait until it fits."""

    def __init__(self, max_passes: int) -> None:
        self._max_passes = max_passes
        self._passes = 0
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def push(self, job: Job) -> None:
        self._jobs[job.index] = job

    def take(self, fits: Callable[[Job], bool]) -> Job | None:
        """The next one that may come in; it leaves the line."""
        for place, job in enumerate(self._jobs.values()):
            if place and (self._passes >= self._max_passes or place >= WINDOW):
                return None
            if fits(job):
                self._passes = 0 if place == 0 else self._passes + 1
                del self._jobs[job.index]
                return job
        return None
