"""`baton decide`: does the split pay, on these devices, for this workload, with these objectives?"""

import asyncio
import gc
import shlex
import sys
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.bench import Asking, Limits, WorkloadOptions, build_workload, load_counter, open_target
from baton.bench.decide import (
    CellSetting,
    DecideRecord,
    IdleProbe,
    RateGrid,
    Shape,
    Sweep,
    SweepPlan,
    chunk_tokens,
    judge,
    save,
    start_rps,
    targets_of,
)
from baton.bench.decide import load as load_record
from baton.bench.decide.machine import describe_machine
from baton.bench.decide.markdown import decide_markdown
from baton.bench.decide.record import FILE_NAME, VERSION, Equality, IdlePoint, Machine, Topology, roles_of
from baton.bench.decide.weights import are_dummy
from baton.bench.energy import EnergyMeter, EnergySource
from baton.bench.errors import require
from baton.bench.numbers import plain
from baton.bench.tokens import CountTokens, gives_back
from baton.cli import bench_options as flags
from baton.cli.bench_commands import explained
from baton.cli.decide_pool import Device, Pool, is_shared, parse_devices, parse_splits, topologies_of
from baton.cli.demo import watched
from baton.cli.errors import UsageError
from baton.cli.fleet import FleetOptions, Transport
from baton.cli.metering import metering
from baton.cli.model.progress import ConsoleReporter
from baton.cli.services import Supervisor
from baton.cli.up import ModelOption, TransportOption, VerboseOption, progress_line, resolve_model, supervised

DRAIN_TIMEOUT_S = 20.0
BATCHES = (4, 8)
CALIBRATION_ROUNDS = 3


@dataclass(frozen=True)
class Pace:
    """How long a run takes. `quick` is for a look within ten minutes on two CPU cores: short prompts and cells, objectives for 90 % of requests."""

    cell_s: float
    num_repeats: int
    step: float
    budget_s: float
    attainment: float
    idle_rounds: int


QUICK = Pace(cell_s=12.0, num_repeats=4, step=1.2, budget_s=470.0, attainment=0.9, idle_rounds=2)
FULL = Pace(cell_s=60.0, num_repeats=3, step=1.1, budget_s=7200.0, attainment=0.99, idle_rounds=5)


@dataclass(frozen=True)
class Wanted:
    """What was asked for, checked."""

    options: FleetOptions
    devices: tuple[Device, ...]
    topologies: tuple[Topology, ...]
    workload: WorkloadOptions
    pace: Pace
    ttft_ms: float | None
    itl_p99_ms: float | None
    load_rps: float | None
    start_rps: float | None
    plain_chunk: int | None
    limits: Limits
    folder: Path


def decide(
    model: ModelOption = "smollm2",
    devices: Annotated[
        str, typer.Option(help="cpu:CORE, cpu:FIRST-LAST or cuda:NUMBER, separated by commas: a server each. The same twice is shared.")
    ] = "cpu:0,cpu:1",
    quick: Annotated[bool, typer.Option("--quick", help="A look within ten minutes on two CPU cores.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for decide.json, decide.md and the raw samples of every cell.")] = Path("decide-results"),
    verdict_of: Annotated[
        Path | None, typer.Option("--verdict-of", help="Measures nothing: judges an earlier run's folder again, as this version does.", exists=True)
    ] = None,
    splits: Annotated[str | None, typer.Option(help="Which PREFILL:DECODE ratios, separated by commas; every one when not given.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective; three times an idle server's for a long prompt when not given.")] = None,
    itl_p99_ms: Annotated[float | None, typer.Option(help="Objective, p99 of a request's own gaps; three idle steps when not given.")] = None,
    attainment: Annotated[float | None, typer.Option(help="Part of the requests that must meet both; 0.99, with --quick 0.9.")] = None,
    load: Annotated[float | None, typer.Option(help="Your load, requests/s: asks for the simplest topology that carries it.")] = None,
    start_rate: Annotated[float | None, typer.Option(help="Requests/s where the search begins; estimated from idle servers when not given.")] = None,
    cell_s: Annotated[float | None, typer.Option(help="Seconds of arrivals in one measurement; 60, with --quick 12.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Rounds of repeats around the limits; 3, with --quick up to 4.", min=0)] = None,
    budget_s: Annotated[float | None, typer.Option(help="No round of repeats that would end later; 7200, with --quick 470.")] = None,
    plain_chunk: Annotated[
        int | None, typer.Option(help="Most prompt tokens beside the streams in a plain server's step; as ITL allows when not given.", min=1)
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="The longest that one request may take.")] = 120.0,
    transport: TransportOption = Transport.AUTO,
    worker_flag: Annotated[list[str] | None, typer.Option(help="Handed to every server, again and again: --worker-flag=--dtype=bfloat16")] = None,
    workload: flags.WorkloadName = "chat",
    seed: flags.Seed = 0,
    file: flags.File = None,
    prompt_words: flags.PromptWords = None,
    answer_tokens: flags.AnswerTokens = None,
    document_words: flags.DocumentWords = None,
    document_share: flags.DocumentShare = None,
    sessions: flags.Sessions = None,
    turns: flags.Turns = None,
    shared_words: flags.SharedWords = None,
    length_scale: flags.LengthScale = None,
    verbose: VerboseOption = False,
) -> None:
    """One server, copies, or a split? Measures all of them on the same devices under rising load and says which, why, and how sure it is."""
    with explained():
        if verdict_of is not None:
            _show(replace(load_record(verdict_of), verdict=None))
            return
        given = {"cell_s": cell_s, "num_repeats": repeats, "budget_s": budget_s, "attainment": attainment}
        pace = _with(QUICK if quick else FULL, given)
        asked = WorkloadOptions(
            workload, seed, file, prompt_words, answer_tokens, document_words, document_share, sessions, turns, shared_words, length_scale
        )
        if quick and workload == "chat":
            asked = _shrunk(asked)
        build_workload(asked)
        RateGrid(1.0 if start_rate is None else start_rate)
        found = parse_devices(devices)
        model_path, model_name = resolve_model(model)
        if (out / FILE_NAME).exists():
            raise UsageError(f"--out: {out} holds an earlier run, which is not written over; choose another folder")
        options = FleetOptions(
            model_path, model_name, transport=transport, http_port=0, grpc_port=0, bootstrap_port=0, worker_flags=tuple(worker_flag or ())
        )
        topologies = topologies_of(len(found), parse_splits(splits))
        wanted = Wanted(options, found, topologies, asked, pace, ttft_ms, itl_p99_ms, load, start_rate, plain_chunk, Limits(timeout_s), out)
        _show(_run(wanted, Console(stderr=True), verbose))


def _shrunk(asked: WorkloadOptions) -> WorkloadOptions:
    """The default chat for a small model on a CPU, where the command line does not say otherwise."""
    return replace(
        asked,
        prompt_words=12 if asked.prompt_words is None else asked.prompt_words,
        document_words=192 if asked.document_words is None else asked.document_words,
        document_share=0.2 if asked.document_share is None else asked.document_share,
        answer_tokens=16 if asked.answer_tokens is None else asked.answer_tokens,
    )


def _with(pace: Pace, given: Mapping[str, float | None]) -> Pace:
    """`pace` with what the command line said. Raises SettingError."""
    found = Pace(**(asdict(pace) | {name: value for name, value in given.items() if value is not None}))
    require(found.cell_s > 0, "--cell-s", found.cell_s, "above 0")
    require(found.budget_s > 0, "--budget-s", found.budget_s, "above 0")
    require(0 < found.attainment <= 1, "--attainment", found.attainment, "above 0 and at most 1")
    return found


def _show(record: DecideRecord) -> None:
    print(decide_markdown(record, record.verdict or judge(record)), end="")


def _run(wanted: Wanted, console: Console, verbose: bool) -> DecideRecord:
    """Starts everything, measures, judges, saves; ends every server whatever happens."""
    machine = describe_machine(with_gpus=any(device.is_gpu for device in wanted.devices))
    wanted.folder.mkdir(parents=True, exist_ok=True)
    metered = metering(wanted.devices, ConsoleReporter(console))
    with supervised(DRAIN_TIMEOUT_S, console, verbose) as supervisor, metered as (meter, energy):
        run = _Run(wanted, machine, supervisor, console, meter, energy)
        run.start()
        record = asyncio.run(watched(supervisor, run.measure()))
        verdict = judge(record)
        record = replace(record, verdict=verdict)
        save(record, wanted.folder)
        (wanted.folder / "decide.md").write_text(decide_markdown(record, verdict))
    console.print(f"record and raw samples: {wanted.folder}", markup=False, highlight=False, soft_wrap=True)
    return record


def token_counter(options: FleetOptions) -> tuple[CountTokens | None, tuple[str, ...]]:
    """How tokens are counted again from texts, or None where that says nothing; and what the reader is to know of that. Raises BenchFileError."""
    if are_dummy(options.worker_flags):
        return None, ()  # the verdict says so, by the servers' commands
    if not gives_back(options.model_path):
        return None, ("output tokens were not counted again from the texts: the model's tokenizer does not give the tokens of a plain text back",)
    return load_counter(options.model_path), ()


class _Run:
    def __init__(
        self, wanted: Wanted, machine: Machine, supervisor: Supervisor, console: Console, meter: EnergyMeter | None, energy: EnergySource
    ) -> None:
        self._wanted, self._machine, self._supervisor, self._console = wanted, machine, supervisor, console
        self._meter, self._energy = meter, energy
        self._reporter = ConsoleReporter(console)
        self._pool = Pool(wanted.options, wanted.devices, wanted.topologies, supervisor)
        self._shape = Shape.of(build_workload(wanted.workload))
        self._addresses: dict[str, str] = {}

    def start(self) -> None:
        """The splits first: what they take idle decides the objectives and the plain servers' chunk."""
        wanted = self._wanted
        with progress_line(self._console) as note:
            self._addresses |= self._pool.start(["split"], (), note)
        first = dict(list(self._addresses.items())[:1])
        idle = asyncio.run(watched(self._supervisor, self._calibrate(first)))
        self._targets = targets_of(idle, wanted.ttft_ms, wanted.itl_p99_ms, wanted.pace.attainment, wanted.load_rps)
        self._chunk = chunk_tokens(idle, self._targets.itl_p99_ms) if wanted.plain_chunk is None else wanted.plain_chunk
        begin_at = wanted.load_rps if wanted.start_rps is None else wanted.start_rps
        self._start_rps = start_rps(idle, self._shape, len(wanted.devices)) if begin_at is None else begin_at
        targets = self._targets
        self._reporter.note(
            f"objectives: TTFT {targets.ttft_ms:g} ms, ITL p99 {targets.itl_p99_ms:g} ms ({targets.source}); plain servers compute at "
            f"most {self._chunk} prompt tokens beside streams; the search begins at {plain(self._start_rps)} requests/s"
        )
        with progress_line(self._console) as note:
            self._addresses |= self._pool.start(["one", "copies"], ("--mixed-prompt-tokens", str(self._chunk)), note)

    async def _calibrate(self, addresses: dict[str, str]) -> list[IdlePoint]:
        """Of one split, with one round before that is thrown away."""
        probe = IdleProbe(addresses, self._wanted.options.model_name, seed=1)
        try:
            with self._reporter.step("calibrating", 3) as step:
                await probe.one_at_a_time(self._shape.lengths[:1], 1)
                step(1)
                single = await probe.one_at_a_time((self._shape.lengths[0], self._shape.lengths[-1]), CALIBRATION_ROUNDS)
                step(2)
                several = await probe.several_at_once(BATCHES[:1])
                step(3)
                return [*single, *several]
        finally:
            await probe.aclose()

    async def measure(self) -> DecideRecord:
        wanted = self._wanted
        addresses = {topology.name: self._addresses[topology.name] for topology in wanted.topologies}
        equality, idle = await self._idle(addresses)
        count_tokens, notes = token_counter(wanted.options)
        record = replace(self._record(equality, idle), notes=notes)
        save(record, wanted.folder)
        if equality.different:
            return record
        grid = RateGrid(self._start_rps, step=wanted.pace.step)
        plan = SweepPlan(grid, wanted.pace.cell_s, num_repeats=wanted.pace.num_repeats, budget_s=wanted.pace.budget_s, seed=wanted.workload.seed)
        setting = CellSetting(
            model=wanted.options.model_name,
            workload=wanted.workload,
            targets=self._targets,
            limits=wanted.limits,
            count_tokens=count_tokens,
            folder=wanted.folder,
            session=uuid.uuid4().hex,
            started_at=record.created_at,
            meter=self._meter,
            roles=roles_of(wanted.topologies, self._pool.servers),
        )
        asking = Asking(wanted.options.model_name)
        async with AsyncExitStack() as stack:
            targets = {name: open_target(f"grpc://{address}", "completions", asking) for name, address in addresses.items()}
            for target in targets.values():
                stack.push_async_callback(target.aclose)
            gc.freeze()  # what is here to stay is not looked through while arrivals are being stamped
            return await Sweep(plan, record, targets, setting, self._reporter.step, lambda found: save(found, wanted.folder)).run()

    async def _idle(self, addresses: dict[str, str]) -> tuple[Equality, list[IdlePoint]]:
        probe = IdleProbe(addresses, self._wanted.options.model_name, seed=2)
        try:
            with self._reporter.step("are the answers equal, and what do idle servers take?", 3) as step:
                equality = await probe.equality()
                step(1)
                single = await probe.one_at_a_time(self._shape.lengths, self._wanted.pace.idle_rounds)
                step(2)
                several = await probe.several_at_once(BATCHES)
                step(3)
                return equality, [*single, *several]
        finally:
            await probe.aclose()

    def _record(self, equality: Equality, idle: list[IdlePoint]) -> DecideRecord:
        wanted = self._wanted
        return DecideRecord(
            version=VERSION,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(["baton", *sys.argv[1:]]),
            model=wanted.options.model_name,
            devices=tuple(device.name for device in wanted.devices),
            shared_device=is_shared(wanted.devices),
            machine=self._machine,
            targets=self._targets,
            workload=build_workload(wanted.workload).describe(),
            chunk_tokens=self._chunk,
            servers=tuple(self._pool.servers),
            topologies=wanted.topologies,
            idle=tuple(idle),
            equality=equality,
            energy=self._energy,
        )
