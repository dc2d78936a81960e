"""What the host does of a decode step, part by part, without a GPU: the decode worker's own threads over a device that only takes its time.

    python benchmarks/decode_host_cpu.py [--streams 64] [--step-ms 10] [--steps 300] [--profile FILE]

The engine's thread runs the GPU's path (scheduler, seats, uploads, tokens read one step behind) over CPU tensors, with a tiny model for the prompts
and nothing in the place of a captured decode step: its outcome is there `--step-ms` after its launch. The front answers a gateway session in another
process over gRPC, one report a step, on the services' event loop and with their turns of the interpreter's lock. Parts are those of
gpu/decode_host.py, means and medians in ms; of launch what is the host's own, without the graph's launch and without pinned memory. `reply` is the
processor time of the front's thread a step. --profile: of the engine's thread, for pstats.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import torch
import uvloop
from opentelemetry.trace import NoOpTracer

from baton.engine import Engine, EngineConfig, Role
from baton.engine.device.model import DeviceModel
from baton.engine.dummy_weights import DummyReader
from baton.engine.grammar import Grammars
from baton.engine.model_config import parse_model_config
from baton.engine.step_time import PARTS
from baton.servicekit import GrpcServer, LogSettings, configure_logs
from baton.servicekit.lifecycle import LOCK_TURN_S
from baton.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from baton.wire.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.workerkit import Description, EngineHost, Limits, WorkerFront
from baton.workerkit.serving import add_services

PROMPT_TOKENS, SETTLE_STEPS, VOCABULARY = 64, 20, 128
GEOMETRY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
#: All but the wait for the device, and launch by itself.
COUNTED = ("admit", "schedule", "commit", "deliver", "reply")


class NoTransfer:
    """The decode role's port, for rooms whose prompts are computed here."""

    def poll(self) -> list[object]:
        return []

    def quarantined_pages(self) -> int:
        return 0


class Due:
    """The event of a step that has run when its time is over."""

    def __init__(self, due: float) -> None:
        self.due = due

    def query(self) -> bool:
        return time.monotonic() >= self.due


class Window:
    """Told of each step on the engine's thread: opens some steps after all streams decode, and closes `num_steps` later."""

    def __init__(self, num_streams: int, num_steps: int, front_clock: int) -> None:
        self._num_streams = num_streams
        self._unsettled = SETTLE_STEPS
        self._left = num_steps
        self._front_clock = front_clock
        self.spent: list[Sequence[float]] = []
        self.front = [0.0, 0.0]
        self.done = threading.Event()

    def sized(self, took_s: float, num_sequences: int, num_tokens: int) -> None:
        if num_sequences == num_tokens == self._num_streams:
            self._unsettled -= 1

    def step(self, spent: Sequence[float], idle_s: float | None) -> None:
        if self._unsettled > 0 or self.done.is_set():
            return
        if not self.spent:
            self.front[0] = time.clock_gettime(self._front_clock)
        self.spent.append(list(spent))
        self._left -= 1
        if not self._left:
            self.front[1] = time.clock_gettime(self._front_clock)
            self.done.set()


def make_engine(given: argparse.Namespace) -> Engine:
    config, device = parse_model_config(GEOMETRY, Path("geometry")), torch.device("cpu")
    with torch.inference_mode():
        model = DeviceModel(config, DummyReader(torch.float32), torch.float32, device)
    longest = PROMPT_TOKENS + given.steps + 400
    limits = EngineConfig(num_pages=given.streams * -(-longest // 16) + 1, max_running=given.streams, num_threads=1, max_num_batched_tokens=1024)
    engine = Engine(Role.DECODE, model, limits, importer=NoTransfer())  # type: ignore[arg-type]
    runner, last = engine._runner, [0.0]
    runner._steps._compute = lambda size: None  # type: ignore[attr-defined]
    launch = runner.launch

    def timed(*args):  # type: ignore[no-untyped-def]
        flight = launch(*args)
        last[0] = max(last[0], time.monotonic()) + given.step_ms / 1e3
        flight._event = Due(last[0])  # type: ignore[attr-defined]
        return flight

    runner.launch = timed  # type: ignore[method-assign]
    return engine


async def measure(given: argparse.Namespace) -> Window:
    engine = make_engine(given)
    window = Window(given.streams, given.steps, time.pthread_getcpuclockid(threading.main_thread().ident or 0))
    engine.on_step(window.sized)
    engine.step_time.on_step(window.step)
    host = EngineHost(engine, step_time=engine.step_time)
    if given.profile:
        profiled(host, given.profile)
    limits = Limits(Role.DECODE, VOCABULARY, 4096, engine.layout.num_pages, engine.layout.page_size)
    about = Description("bench", "m", "0", common_pb2.KVFingerprint())
    front = WorkerFront(host, limits, about, grammars=Grammars(Path(), VOCABULARY), max_rooms=4096, tracer=NoOpTracer())
    server = GrpcServer("127.0.0.1", 0, options=SERVER_OPTIONS)
    add_services(server, front, Role.DECODE)
    await server.start()
    front.start()
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", server.address, "--streams", str(given.streams), "--steps", str(given.steps)
    )
    try:
        await asyncio.to_thread(window.done.wait)
    finally:
        client.kill()
        await client.wait()
        await server.stop()
        await front.close()
        engine.close()
    return window


def profiled(host: EngineHost, file: str) -> None:
    run, profile = host._run, cProfile.Profile()

    def around() -> None:
        profile.runcall(run)
        profile.dump_stats(file)

    host._thread = threading.Thread(target=around, name="engine", daemon=True)


def report(window: Window, given: argparse.Namespace) -> None:
    took = {part: [1e3 * spent[place] for spent in window.spent] for place, part in enumerate(PARTS)}
    means = {part: statistics.fmean(each) for part, each in took.items()}
    means["reply"] = 1e3 * (window.front[1] - window.front[0]) / max(1, len(window.spent) - 1)
    medians = {part: statistics.median(each) for part, each in took.items()}
    print(f"{given.streams} streams, {len(window.spent)} steps of {given.step_ms} ms or more")
    for part in ("admit", "schedule", "launch", "commit", "deliver", "reply", "wait"):
        print(f"  {part:<9} mean {means[part]:7.4f} ms" + (f"  p50 {medians[part]:7.4f}" if part in medians else ""))
    without = sum(means[part] for part in COUNTED)
    print(f"sum of the means without launch {without:.4f} ms, with the host's part of launch {without + means['launch']:.4f} ms")


async def drive(address: str, num_streams: int, max_tokens: int) -> None:
    """The gateway's side: opens the rooms and reads every report."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(worker_pb2.Command(attach=worker_pb2.Attach(gateway_id="bench", gateway_address="-")))
        for room in range(1, num_streams + 1):
            prompt = [(room + place) % VOCABULARY for place in range(PROMPT_TOKENS)]
            sampling = worker_pb2.Sampling(top_p=1.0, max_tokens=max_tokens)
            await call.write(
                worker_pb2.Command(start=worker_pb2.Start(room=room, prompt_token_ids=prompt, sampling=sampling, local=worker_pb2.LocalLeg()))
            )
        while await call.read() is not grpc.aio.EOF:
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(drive(given.client, given.streams, given.steps + 400))
        return 0
    configure_logs(LogSettings(level="error"), service="bench", instance_id="bench")
    sys.setswitchinterval(LOCK_TURN_S)
    report(uvloop.run(measure(given)), given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
