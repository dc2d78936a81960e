"""Repeats of one workload against one or more targets, in turns, so that what slows the machine slows all of them."""

import platform
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from baton.bench.arrivals import ArrivalOptions, ClosedLoop, build_arrivals
from baton.bench.errors import require
from baton.bench.generator import Generator, Limits, Measured, counting
from baton.bench.request import Request
from baton.bench.runfile import RunHeader, RunWriter
from baton.bench.targets.base import Target
from baton.bench.workload import Workload, WorkloadOptions, build_workload

WARM_UP_CLIENTS = 4


class Progress(Protocol):
    """Shows a step of `total` requests until its context ends."""

    def __call__(self, text: str, total: int) -> AbstractContextManager[Callable[[int], None]]: ...


@dataclass(frozen=True)
class Plan:
    """`num_warm_up`: requests before the first repeat that are not counted. Repeat r takes seed + r, so that no cache answers for an earlier one."""

    workload: WorkloadOptions
    arrivals: ArrivalOptions
    num_requests: int
    num_warm_up: int = 4
    num_repeats: int = 1
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        require(self.num_requests >= 1, "num_requests", self.num_requests, "at least 1")
        require(self.num_warm_up >= 0, "num_warm_up", self.num_warm_up, "at least 0")
        require(self.num_repeats >= 1, "num_repeats", self.num_repeats, "at least 1")

    def workload_of(self, repeat: int) -> Workload:
        return build_workload(replace(self.workload, seed=self.workload.seed + repeat))

    def requests_of(self, workload: Workload) -> tuple[list[Request], list[Request]]:
        """(warm-up, measured). Raises SettingError where the workload has fewer."""
        needed = self.num_warm_up + self.num_requests
        if workload.size is not None:
            require(needed <= workload.size, "num_requests + num_warm_up", needed, f"at most {workload.size}, the size of the workload")
        requests = [workload.request(index) for index in range(needed)]
        return requests[: self.num_warm_up], requests[self.num_warm_up :]

    def arrivals_of(self, repeat: int) -> ArrivalOptions:
        return replace(self.arrivals, seed=self.arrivals.seed + repeat)


@dataclass(frozen=True)
class Contestant:
    """A target under the name that its files will have."""

    name: str
    model: str
    target: Target


async def measure(plan: Plan, contestants: Sequence[Contestant], folder: Path, progress: Progress) -> list[Path]:
    """One run file a contestant in `folder` (created). Repeats go round in turns, every other round backwards.

    Raises SettingError for a plan that does not fit its workload, or a run file that is there already, before anything is sent."""
    writers = _open_writers(plan, contestants, folder)
    try:
        for repeat in range(plan.num_repeats):
            warm_up, requests = plan.requests_of(plan.workload_of(repeat))
            order = list(zip(contestants, writers, strict=True))
            for contestant, writer in order if repeat % 2 == 0 else reversed(order):
                turn = _Turn(plan, contestant, repeat, progress)
                warm = await turn.warm_up(warm_up) if repeat == 0 and warm_up else Measured()
                measured = await turn.measure(requests)
                writer.add(repeat, [*warm.samples, *measured.samples], measured)
    finally:
        for writer in writers:
            writer.close()
    return [writer.path for writer in writers]


def machine_text() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"


@dataclass(frozen=True)
class _Turn:
    plan: Plan
    contestant: Contestant
    repeat: int
    progress: Progress

    async def warm_up(self, requests: Sequence[Request]) -> Measured:
        with self.progress(f"{self.contestant.name}: warm-up", len(requests)) as step:
            generator = Generator(self.contestant.target, self.plan.limits, self.repeat, is_warm_up=True, on_done=counting(step))
            return await generator.run(requests, ClosedLoop(WARM_UP_CLIENTS))

    async def measure(self, requests: Sequence[Request]) -> Measured:
        arrivals = build_arrivals(self.plan.arrivals_of(self.repeat), requests)
        with self.progress(f"{self.contestant.name}: repeat {self.repeat + 1} of {self.plan.num_repeats}", len(requests)) as step:
            generator = Generator(self.contestant.target, self.plan.limits, self.repeat, is_warm_up=False, on_done=counting(step))
            return await generator.run(requests, arrivals)


def _open_writers(plan: Plan, contestants: Sequence[Contestant], folder: Path) -> list[RunWriter]:
    names = [contestant.name for contestant in contestants]
    require(len(set(names)) == len(names) and bool(names), "targets", names, "at least one, each with a name of its own (NAME=URL)")
    workload = plan.workload_of(0)
    _, requests = plan.requests_of(workload)
    arrivals = build_arrivals(plan.arrivals, requests).describe()
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        require(not (folder / f"{name}.jsonl").exists(), "folder", str(folder), f"one without a {name}.jsonl: an earlier run is not written over")
    session, now = uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds")
    machine = machine_text()
    writers = []
    for contestant in contestants:
        header = RunHeader(
            name=contestant.name,
            target=contestant.target.name,
            model=contestant.model,
            workload=workload.describe(),
            arrivals=arrivals,
            num_requests=plan.num_requests,
            num_warm_up=plan.num_warm_up,
            num_repeats=plan.num_repeats,
            session=session,
            started_at=now,
            machine=machine,
        )
        writers.append(RunWriter(folder / f"{contestant.name}.jsonl", header))
    return writers
