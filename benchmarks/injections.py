"""Chat streams run and long prompts are injected: what happens to the gaps of the streams, in a split and in plain copies of the same devices?

    python benchmarks/injections.py --devices cpu:0,cpu:1 --out docs/results/NAME

Every server is pinned to its own core (or has its own GPU; `cuda:0,cuda:0` shares one and says so). For each rate of injections, in turns: the split
and the copies with injections, and both without. Prints, for each, the p99 of the gaps while an injected prompt was in prefill over the p99 of the
gaps without any injection, against the target for the split, and the rate from which the split's p99 over all gaps is below that of the copies.
Writes NAME.md, NAME.svg and NAME.json with every gap. Exit status 1 if the split misses its target.
"""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from injections_report import markdown, svg
from injections_rows import TOPOLOGIES, Cell, crossover_rps, rows_of
from rich.console import Console

from baton.bench import Asking, Limits, open_target
from baton.bench.arrivals import ClosedLoop, TraceArrivals
from baton.bench.decide.machine import describe_machine
from baton.bench.decide.record import roles_of
from baton.bench.energy import EnergyMeter, metered
from baton.bench.generator import Generator, counting
from baton.bench.measures import split_by_prefill
from baton.bench.request import Message, Request
from baton.bench.sample import Sample
from baton.bench.targets import Target
from baton.bench.text import generator, plain_text
from baton.cli.decide_pool import Pool, is_shared, parse_devices, topologies_of
from baton.cli.demo import watched
from baton.cli.fleet import FleetOptions
from baton.cli.metering import metering
from baton.cli.model.progress import ConsoleReporter
from baton.cli.up import progress_line, resolve_model, supervised

TARGET_RATIO = 1.15
DRAIN_TIMEOUT_S = 20.0
LIMITS = Limits(timeout_s=300.0)


@dataclass(frozen=True)
class Load:
    """`streams` clients, each asking `answers` times for `answer_tokens` tokens; injected prompts have `document_words` words."""

    streams: int
    answers: int
    answer_tokens: int
    chat_words: int
    document_words: int
    document_tokens: int


def chats(load: Load, seed: int) -> list[Request]:
    def one(index: int) -> Request:
        text = plain_text(generator(seed, index), load.chat_words)
        return Request(index, "chat", (Message("user", f"Part {seed}. {text}"),), load.answer_tokens, is_long=False)

    return [one(index) for index in range(load.streams * load.answers)]


def document(load: Load, seed: int, index: int, text: str) -> Request:
    """`text` is made once: the loop that makes it could not note when the streams' tokens came meanwhile. It differs from its first words on."""
    return Request(index, "document", (Message("user", f"Part {index} of {seed}. {text}"),), load.document_tokens, is_long=True)


async def inject(target: Target, load: Load, rate_rps: float, seed: int, over: asyncio.Event) -> list[Sample]:
    """Poisson, from now until `over`; times of the samples are from now. Waits for what it has sent."""
    draw, text = generator(seed, 8), plain_text(generator(seed, 7), load.document_words)
    begun = asyncio.get_running_loop().time()
    tasks: list[asyncio.Task[list[Sample]]] = []

    async def send(index: int, at_s: float) -> list[Sample]:
        measured = await Generator(target, LIMITS, 0, is_warm_up=False, on_done=lambda _: None).run(
            [document(load, seed, index, text)], TraceArrivals((0.0,))
        )
        return [moved(sample, at_s) for sample in measured.samples]

    while rate_rps and not over.is_set():
        try:
            await asyncio.wait_for(over.wait(), draw.exponential(1 / rate_rps))
        except TimeoutError:
            tasks.append(asyncio.create_task(send(len(tasks), asyncio.get_running_loop().time() - begun)))
    return [sample for task in tasks for sample in await task]


def moved(sample: Sample, by_s: float) -> Sample:
    values = {name: getattr(sample, name) + by_s for name in ("scheduled_s", "sent_s", "ended_s")}
    return Sample(**(asdict(sample) | values | {"token_s": tuple(at + by_s for at in sample.token_s)}))


@dataclass(frozen=True)
class Metering:
    """`roles`: "split" or "copies" -> GPU -> roles of its servers."""

    meter: EnergyMeter | None
    roles: Mapping[str, Mapping[str, tuple[str, ...]]]


async def stream(target: Target, load: Load, rate_rps: float, seed: int, on_done: Callable[[Sample], None]) -> tuple[list[Sample], list[Sample]]:
    """(samples of the streams, samples of the injected)."""
    over = asyncio.Event()
    injecting = asyncio.create_task(inject(target, load, rate_rps, seed, over))
    measured = await Generator(target, LIMITS, 0, is_warm_up=False, on_done=on_done).run(chats(load, seed), ClosedLoop(load.streams))
    over.set()
    return measured.samples, await injecting


async def measure(
    target: Target, topology: str, load: Load, rate_rps: float, repeat: int, seed: int, meters: Metering, on_done: Callable[[Sample], None]
) -> Cell:
    streaming = stream(target, load, rate_rps, seed, on_done)
    (samples, injected), energy = await metered(meters.meter, meters.roles.get(topology, {}), streaming)
    found = split_by_prefill([*samples, *injected])
    own = split_by_prefill(injected)  # gaps of the injected requests' own answers are not those of the streams
    cell = Cell(topology, rate_rps, repeat, injected=len(injected), failed=sum(sample.error is not None for sample in [*samples, *injected]))
    cell.all_ms = [1000 * (later - earlier) for sample in samples for earlier, later in pairwise(sample.token_s)]
    cell.during_ms = [1000 * gap for gap in without(found.during_s, own.during_s)]
    cell.ttft_injected_ms = [1000 * (sample.first_s - sample.sent_s) for sample in injected if sample.first_s is not None]
    cell.energy, cell.num_tokens = energy, sum(sample.num_tokens for sample in [*samples, *injected])
    cell.tokens_per_s = sum(sample.num_tokens for sample in samples) / max(sample.ended_s for sample in samples)
    return cell


def without(values: Sequence[float], taken: Sequence[float]) -> list[float]:
    left = list(values)
    for value in taken:
        left.remove(value)
    return left


async def run(
    targets: dict[str, Target],
    load: Load,
    rates: Sequence[float],
    num_repeats: int,
    meters: Metering,
    console: Console,
    keep: Callable[[list[Cell]], None],
) -> list[Cell]:
    cells: list[Cell] = []
    reporter = ConsoleReporter(console)
    with reporter.step("warm-up", 1):
        for name, target in targets.items():
            await measure(target, name, load, rates[-1], -1, 1, meters, lambda _: None)
    for repeat in range(num_repeats):
        turns = [(name, rate) for rate in (0.0, *rates) for name in targets]
        for name, rate in turns if repeat % 2 == 0 else reversed(turns):
            with reporter.step(f"repeat {repeat + 1} of {num_repeats}: {name}, {rate:g} injections/s", load.streams * load.answers) as step:
                # Seeds are of the repeat and the topology: equal lengths, and no prefix of an earlier cell.
                seed = 1000 * (repeat + 1) + len(cells)
                cells.append(await measure(targets[name], name, load, rate, repeat, seed, meters, counting(step)))
            keep(cells)
    return cells


@contextmanager
def served(arguments: argparse.Namespace, console: Console):  # type: ignore[no-untyped-def]
    """(supervisor, topology -> address, name of the model, meter with roles, where the energy is from)."""
    model_path, model_name = resolve_model(arguments.model)
    devices = parse_devices(arguments.devices)
    flags = tuple(arguments.worker_flag)
    options = FleetOptions(model_path, model_name, http_port=0, grpc_port=0, bootstrap_port=0, worker_flags=flags)
    topologies = [topology for topology in topologies_of(len(devices), [(1, len(devices) - 1)]) if topology.kind != "one"]
    with (
        supervised(DRAIN_TIMEOUT_S, console, verbose=False) as supervisor,
        metering(devices, ConsoleReporter(console)) as (meter, energy),
    ):
        pool = Pool(options, devices, topologies, supervisor)
        with progress_line(console) as note:
            found = pool.start(["split"], (), note) | pool.start(["copies"], ("--mixed-prompt-tokens", str(arguments.chunk)), note)
        roles = {short(name): mine for name, mine in roles_of(topologies, pool.servers).items()}
        yield supervisor, {short(name): address for name, address in found.items()}, model_name, Metering(meter, roles), energy


def short(topology: str) -> str:
    return "copies" if topology == "copies" else "split"


async def drive(addresses: dict[str, str], model: str, *rest: object) -> list[Cell]:
    async with AsyncExitStack() as stack:
        targets = {name: open_target(f"grpc://{addresses[name]}", "completions", Asking(model)) for name in TOPOLOGIES}
        for target in targets.values():
            stack.push_async_callback(target.aclose)
        return await run(targets, *rest)  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name of `baton model list`, or a Hugging Face folder")
    parser.add_argument("--devices", default="cpu:0,cpu:1", help="as of `baton decide`; the first is the split's prefill server")
    parser.add_argument("--rates", default="0.05,0.1,0.2,0.4", help="injections a second, ascending")
    parser.add_argument("--chunk", type=int, default=32, help="most prompt tokens that a plain server computes beside its streams")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--answers", type=int, default=3, help="answers of each stream in one cell")
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--chat-words", type=int, default=12)
    parser.add_argument("--document-words", type=int, default=384)
    parser.add_argument("--document-tokens", type=int, default=4, help="answer to an injected prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker-flag", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True, help="path of the report without its ending")
    arguments = parser.parse_args()
    load = Load(
        arguments.streams, arguments.answers, arguments.answer_tokens, arguments.chat_words, arguments.document_words, arguments.document_tokens
    )
    rates, console = [float(text) for text in arguments.rates.split(",")], Console(stderr=True)
    machine = describe_machine(with_gpus="cuda" in arguments.devices)
    raw = arguments.out.with_suffix(".json")
    head = {
        "command": shlex.join(["python", *sys.argv]),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine),
        "model": arguments.model,
        "devices": arguments.devices,
        "shared_device": is_shared(parse_devices(arguments.devices)),
        "chunk_tokens": arguments.chunk,
        "load": asdict(load),
        "repeats": arguments.repeats,
        "target_ratio": TARGET_RATIO,
    }

    def keep(cells: list[Cell]) -> None:
        raw.write_text(json.dumps(head | {"cells": [rounded(asdict(cell)) for cell in cells]}) + "\n")

    with served(arguments, console) as (supervisor, addresses, model, meters, energy):
        head["energy"] = asdict(energy)
        cells = asyncio.run(watched(supervisor, drive(addresses, model, load, rates, arguments.repeats, meters, console, keep)))
    rows = rows_of(cells)
    crossing = crossover_rps(rows)
    arguments.out.with_suffix(".svg").write_text(svg(rows, crossing))
    text = markdown(head, energy, rows, crossing, cells, arguments.out.name)
    arguments.out.with_suffix(".md").write_text(text)
    print(text)
    worst = max((row.ratio["split"] for row in rows if row.rate_rps and "split" in row.ratio), default=float("inf"))
    return 0 if worst <= TARGET_RATIO else 1


def rounded(cell: dict[str, object]) -> dict[str, object]:
    return {name: [round(item, 2) for item in value] if isinstance(value, list) else value for name, value in cell.items()}


if __name__ == "__main__":
    sys.exit(main())
