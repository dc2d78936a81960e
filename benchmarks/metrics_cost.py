"""What metrics cost: tokens a second of two stacks that are equal but for metrics, in turns.

    python benchmarks/metrics_cost.py MODEL_FOLDER [--layers 2] [--turns 21] [--turn-s 6] [--streams 16] [--strict]

Each stack is a gateway, a prefill and a decode server, as `baton up` starts them. The one with metrics is scraped every second, all three services,
which is five times as often as deploy/observability does. Prefix caches are off, because turns ask for the same prompts.
Turns alternate, so that whatever else the machine does falls on both; the median of the ratios of neighbouring turns is printed with its quartiles.
So is the processor time that the three services of a stack take for a token, which other work on the machine moves less. With --strict the exit
status is 1 when more than 2 % of the throughput are lost, and more than 2 % of processor time.

--layers makes the model that shallow, with random weights: less of a step is arithmetic, and more of what is around it shows. With all of its layers
the ratio is what a server on this machine loses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from baton.cli.services import Service, ServiceSpec
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

LIMIT = 0.02
MODEL = "model"
PROMPT_TOKENS = 64
ANSWER_TOKENS = 64
START_S = 120.0
DRAIN_S = 5.0
SCRAPE_S = 1.0


@dataclass(frozen=True)
class Turn:
    """speed: tokens a second. cpu_s: processor seconds of all services for each of them."""

    on: bool
    speed: float
    cpu_s: float


class Stack:
    """One gateway and its pair."""

    def __init__(self, model: Path, folder: Path, undo: ExitStack, flags: tuple[str, ...], worker_flags: tuple[str, ...]) -> None:
        self._folder = folder
        self._undo = undo
        self._pids: list[int] = []
        folder.mkdir()
        common = ("--model-path", str(model), "--model-name", MODEL, "--port", "0", *flags)
        prefill = self._start("prefill", *common, "--bootstrap-port", "0", *worker_flags)
        decode = self._start("decode", *common, *worker_flags)
        servers = ("--prefill", prefill["grpc"], "--decode", decode["grpc"])
        gateway = self._start("gateway", *common, "--http-port", "0", *servers)
        self.address = gateway["grpc"]
        self.scraped = [one["metrics"] for one in (gateway, prefill, decode) if "metrics" in one]
        self._wait_ready(gateway["http"])

    def _start(self, name: str, *flags: str) -> dict[str, str]:
        service = Service(ServiceSpec(name, (sys.executable, "-m", f"baton.{name}.app", *flags)), self._folder, DRAIN_S)
        self._undo.callback(service.reap)
        self._pids.append(service.pid)
        deadline = time.monotonic() + START_S
        while (record := service.ready()) is None:
            if service.exit_text() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start: {service.last_lines()}")
            time.sleep(0.1)
        return dict(record.addresses)

    def cpu_s(self) -> float:
        """Processor seconds of its services so far."""
        return sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) for pid in self._pids) / os.sysconf(
            "SC_CLK_TCK"
        )

    def _wait_ready(self, http: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"http://{http}/ready", timeout=5):
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


async def turn_of(stack: Stack, num_streams: int, turn_s: float) -> Turn:
    """`num_streams` clients each ask for one answer after the other."""
    num_tokens = num_late = 0
    cpu_before = stack.cpu_s()
    async with grpc.aio.insecure_channel(stack.address, options=CHANNEL_OPTIONS) as channel:
        await channel.channel_ready()
        stub = InferenceStub(channel)
        until = time.monotonic() + turn_s
        sampling = pb.SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

        async def client(number: int) -> None:
            nonlocal num_tokens, num_late
            turn = 0
            while time.monotonic() < until:
                turn += 1
                prompt = pb.TokenIds(ids=[100 + (number * 31 + turn * 7 + i) % 4000 for i in range(PROMPT_TOKENS)])
                async for message in stub.Generate(pb.GenerateRequest(model=MODEL, token_ids=prompt, sampling=sampling)):
                    if time.monotonic() < until:
                        num_tokens += len(message.token_ids)
                    else:
                        num_late += len(message.token_ids)

        scraping = [asyncio.create_task(scrape(address)) for address in stack.scraped]
        await asyncio.gather(*(client(number) for number in range(num_streams)))
        for task in scraping:
            task.cancel()
    return Turn(bool(stack.scraped), num_tokens / turn_s, (stack.cpu_s() - cpu_before) / (num_tokens + num_late))


async def scrape(address: str) -> None:
    def once() -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            answer.read()

    while True:
        await asyncio.to_thread(once)
        await asyncio.sleep(SCRAPE_S)


def shallow(model: Path, folder: Path, num_layers: int) -> Path:
    """The model's tokenizer and configuration with so many layers; no weights."""
    folder.mkdir()
    for path in model.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin"):
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    return folder


async def measure(stacks: dict[bool, Stack], arguments: argparse.Namespace) -> list[Turn]:
    for stack in stacks.values():  # first requests are slower
        await turn_of(stack, arguments.streams, arguments.turn_s)
    return [await turn_of(stacks[bool(turn % 2)], arguments.streams, arguments.turn_s) for turn in range(arguments.turns)]


def report(turns: list[Turn], arguments: argparse.Namespace) -> float:
    """The part that is lost, of throughput or of processor time: the smaller, since noise adds to either."""
    layers = f"{arguments.layers} layers, random weights" if arguments.layers else "all layers"
    setting = f"{arguments.model.name} ({layers}), {arguments.streams} streams"
    print(f"{setting}, {len(turns) // 2} turns of {arguments.turn_s:g} s with metrics between as many without")
    speed = ratio_of("tokens a second", turns, lambda turn: turn.speed)
    cpu = ratio_of("processor ms a token", turns, lambda turn: turn.cpu_s * 1e3)
    return min(1 - speed, cpu - 1)


def ratio_of(what: str, turns: list[Turn], value: Callable[[Turn], float]) -> float:
    """Prints, and returns, the median of on/off, each turn with metrics against the two beside it."""
    ratios = [value(one) / ((value(before) + value(after)) / 2) for before, one, after in zip(turns, turns[1:], turns[2:], strict=False) if one.on]
    low, middle, high = statistics.quantiles(ratios, n=4)
    off, on = (statistics.median(value(turn) for turn in turns if turn.on is kind) for kind in (False, True))
    print(f"{what}: off {off:.3f}, on {on:.3f}; on/off {middle:.4f} (quartiles {low:.4f} to {high:.4f})")
    return middle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--layers", type=int, default=0, help="layers of a shallow model with random weights; 0: the model as it is")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--turn-s", type=float, default=6.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--strict", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        model, worker_flags = arguments.model, ("--threads", "1", "--num-pages", "2048", "--no-prefix-cache")
        if arguments.layers:
            model, worker_flags = shallow(model, Path(folder) / MODEL, arguments.layers), (*worker_flags, "--load-format", "dummy")
        metrics = ("--metrics-exporter", "prometheus", "--metrics-port", "0")
        stacks = {on: Stack(model, Path(folder) / f"metrics-{on}", undo, metrics if on else (), worker_flags) for on in (False, True)}
        lost = report(asyncio.run(measure(stacks, arguments)), arguments)
    return 1 if arguments.strict and lost > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
