"""One topology under one load: sends, writes the raw samples, sums them up."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.bench.arrivals import PoissonArrivals
from baton.bench.decide.record import Cell, Phase, Targets
from baton.bench.energy import EnergyMeter, metered
from baton.bench.generator import Generator, Limits
from baton.bench.measures import Objectives, duration_s, gaps_s, goodput, ttft_s
from baton.bench.request import Message, Request
from baton.bench.runfile import RunHeader, RunWriter, load_run
from baton.bench.sample import Sample
from baton.bench.session import machine_text
from baton.bench.summary import summarise
from baton.bench.targets import Target
from baton.bench.tokens import CountTokens
from baton.bench.workload import WorkloadOptions, build_workload

AUTHOR = re.compile(r"\[(?P<cause>\w+): ended by (?P<author>\w+)(?: in (?P<stage>\w+))?.*\]")


@dataclass(frozen=True)
class CellPlan:
    """What to ask. `salt` begins every prompt, so that no prefix cache answers for another cell; requests of equal `seed` are equal but for it."""

    number: int
    topology: str
    phase: Phase
    round: int
    rate_rps: float
    num_requests: int
    seed: int

    @property
    def salt(self) -> str:
        return f"Part {self.number}. "


@dataclass(frozen=True)
class CellSetting:
    """What all cells of a run share. `session` and `started_at`: of the run. `roles`: topology -> device -> roles, for `meter`."""

    model: str
    workload: WorkloadOptions
    targets: Targets
    limits: Limits
    count_tokens: CountTokens | None
    folder: Path
    session: str
    started_at: str
    meter: EnergyMeter | None = None
    roles: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)


async def measure_cell(plan: CellPlan, target: Target, setting: CellSetting, started_s: float, on_done: Callable[[Sample], None]) -> Cell:
    """Sends what `plan` says and returns when every request has ended. `started_s`: what the cell is to say about when it began."""
    workload = build_workload(replace(setting.workload, seed=plan.seed))
    num_requests = plan.num_requests if workload.size is None else min(plan.num_requests, workload.size)
    requests = [salted(workload.request(index), plan.salt) for index in range(num_requests)]
    arrivals = PoissonArrivals(plan.rate_rps, plan.seed)
    path = setting.folder / "cells" / f"{plan.number:03d}-{plan.topology}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = RunHeader(
        name=plan.topology,
        target=target.name,
        model=setting.model,
        workload=workload.describe(),
        arrivals=arrivals.describe(),
        num_requests=num_requests,
        num_warm_up=0,
        num_repeats=1,
        session=setting.session,
        started_at=setting.started_at,
        machine=machine_text(),
    )
    sending = Generator(target, setting.limits, 0, is_warm_up=False, on_done=on_done).run(requests, arrivals)
    measured, energy = await metered(setting.meter, setting.roles.get(plan.topology, {}), sending)
    writer = RunWriter(path, header)
    try:
        writer.add(0, measured.samples, measured, energy)
    finally:
        writer.close()
    return sum_up(plan, path, setting, started_s)


def sum_up(plan: CellPlan, path: Path, setting: CellSetting, started_s: float) -> Cell:
    """The cell that the samples in `path` tell of."""
    run = load_run(path)
    objectives = Objectives(setting.targets.ttft_ms, setting.targets.itl_p99_ms)
    found, good = summarise(run, None, setting.count_tokens), goodput(run.samples, objectives, duration_s(run.samples))
    answered = [sample for sample in run.samples if sample.error is None]
    return Cell(
        number=plan.number,
        topology=plan.topology,
        phase=plan.phase,
        round=plan.round,
        rate_rps=plan.rate_rps,
        seed=plan.seed,
        samples=str(path.relative_to(setting.folder)),
        started_s=round(started_s, 3),
        duration_s=round(duration_s(run.samples), 3),
        num_requests=len(run.samples),
        num_good=good.num_good,
        num_failed=found.num_failed,
        num_late_first=sum(_is_late(sample, objectives) for sample in answered),
        num_slow_gaps=sum(_is_slow(sample, objectives) for sample in answered),
        num_long=found.long_prompts.num_long,
        errors=found.errors,
        failures=authors(run.samples),
        goodput_rps=good.good_rps,
        output_tokens_per_s=found.output_tokens_per_s,
        ttft_ms=found.latencies.ttft_ms,
        itl_ms=found.latencies.itl_ms,
        tpot_ms=found.latencies.tpot_ms,
        e2e_ms=found.latencies.e2e_ms,
        itl_during_ms=found.long_prompts.during_ms,
        itl_without_ms=found.long_prompts.without_ms,
        server=found.server,
        tokens_reported=found.tokens.reported,
        tokens_retokenised=found.tokens.retokenised,
        num_tokens_differing=found.tokens.num_differing,
        lag=found.lag.verdicts,
        energy=run.energy,
    )


def salted(request: Request, salt: str) -> Request:
    first, *rest = request.messages
    return replace(request, messages=(Message(first.role, salt + first.content), *rest))


def authors(samples: Iterable[Sample]) -> dict[str, int]:
    """Who ended the failed requests, in the servers' own words where they gave them; most frequent first."""
    return dict(Counter(_author(sample) for sample in samples if sample.error is not None).most_common())


def _author(sample: Sample) -> str:
    said = AUTHOR.search(sample.error_detail)
    if said is not None:
        return f"{said['cause']}: ended by {said['author']}" + (f" in {said['stage']}" if said["stage"] else "")
    return "ended by the load generator: its own timeout" if sample.error == "timeout" else f"{sample.error}: no author named"


def _is_late(sample: Sample, objectives: Objectives) -> bool:
    first = ttft_s(sample)
    return first is None or 1000 * first > objectives.ttft_ms


def _is_slow(sample: Sample, objectives: Objectives) -> bool:
    return not replace(objectives, ttft_ms=float("inf")).met_by(sample) if gaps_s(sample) else False


def met(cells: Sequence[Cell], attainment: float) -> bool:
    """Whether these cells, taken together, meet the objectives."""
    num_requests = sum(cell.num_requests for cell in cells)
    return num_requests > 0 and sum(cell.num_good for cell in cells) >= attainment * num_requests
