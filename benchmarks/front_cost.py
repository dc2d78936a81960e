"""What the RPC front costs the engine: one process, one interpreter lock, step times with and without a busy front, in turns.

    python benchmarks/front_cost.py MODEL_FOLDER [--streams 16] [--threads 1] [--blocks 41] [--strict]
    python benchmarks/front_cost.py --sleep-ms 5 [--streams 64]

A plain engine decodes for `--streams` rooms on its own thread, as it does in a server. In every other block of steps its events go nowhere;
in the blocks between they go through the real front to a gateway session in another process, one report a step, while that session also sends
starts with prompts of 1,000 tokens that the front has to read and refuse. The median of the blocks' ratios is printed with its quartiles.
With --strict the exit status is 1 when it is above the limit of the design (1.03).

Without a model the engine only sleeps: what is left is the front's own processor time a step.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from opentelemetry.trace import NoOpTracer

from baton.engine import Engine, EngineConfig, EngineEvent, EngineStats, KVLayout, Request, Role, load_model
from baton.engine.grammar import Grammars
from baton.engine.types import Token
from baton.servicekit import GrpcServer, LogSettings, configure_logs
from baton.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from baton.wire.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.workerkit import Description, EngineHost, Limits, WorkerFront
from baton.workerkit.host import Batch
from baton.workerkit.serving import add_services

LIMIT = 1.03
STEPS_A_BLOCK = 25
#: The first steps after a turn still feel the other side.
SKIPPED_STEPS = 3
MAX_TOKENS = 1900
PROMPT_TOKENS = 32
REFUSED_PROMPT_TOKENS = 1000
REFUSED_A_SECOND = 20


@dataclass
class Meter:
    """Wraps the engine: times every step, and turns the front on and off by block. Written by the engine's thread."""

    engine: Engine | SleepingEngine
    num_streams: int
    num_blocks: int
    forward: bool = False
    steps: int = 0
    block: list[float] = field(default_factory=list)
    blocks: list[tuple[bool, float]] = field(default_factory=list)
    #: Processor time of the front's thread, in seconds, by block.
    front_cpu: list[tuple[bool, float]] = field(default_factory=list)
    front_clock: int = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    front_before: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def step(self) -> list[EngineEvent]:
        began = time.perf_counter()
        events = self.engine.step()
        took_s = time.perf_counter() - began
        stats = self.engine.stats()
        if stats.running == self.num_streams and not stats.waiting and not self.done.is_set():
            self._count(took_s)
        return events

    def _count(self, took_s: float) -> None:
        self.steps += 1
        self.block.append(took_s)
        if len(self.block) < STEPS_A_BLOCK:
            return
        front_now = time.clock_gettime(self.front_clock)
        self.front_cpu.append((self.forward, front_now - self.front_before))
        self.front_before = front_now
        self.blocks.append((self.forward, statistics.median(self.block[SKIPPED_STEPS:])))
        self.block.clear()
        self.forward = not self.forward
        if len(self.blocks) == self.num_blocks:
            self.done.set()


class SleepingEngine:
    """One token a room and step, after a sleep that holds no lock."""

    def __init__(self, num_streams: int, sleep_s: float) -> None:
        self.layout = KVLayout(1, 1, 2, 16, 1 << 16, 4)
        self._num_streams = num_streams
        self._sleep_s = sleep_s
        self._rooms: list[int] = []
        self._index = 0

    def add(self, request: Request) -> None:
        self._rooms.append(request.room)

    def give_up(self, room: int, failure: object) -> None:
        """Its steps are short."""

    def abort(self, room: int, failure: object) -> None:
        """The end of the session; nothing is left to do."""

    def on_milestones(self, tell: object) -> None:
        """It has none."""

    def has_work(self) -> bool:
        return len(self._rooms) == self._num_streams

    def step(self) -> list[EngineEvent]:
        if not self.has_work():
            return []
        time.sleep(self._sleep_s)
        self._index += 1
        return [Token(room, self._index, 1) for room in self._rooms]

    def stats(self) -> EngineStats:
        return EngineStats(steps=self._index, running=len(self._rooms))


class Tap:
    """Stands between host and front: in the blocks without a front, only what opens or ends rooms passes."""

    def __init__(self, host: EngineHost, meter: Meter) -> None:
        self._meter = meter
        self._start = host.start
        host.start = self._started  # type: ignore[method-assign]

    def _started(self, deliver, on_failure) -> None:  # type: ignore[no-untyped-def]
        def pass_on(batch: Batch) -> None:
            if self._meter.forward or not self._meter.steps:
                deliver(batch)

        self._start(pass_on, on_failure)


async def serve(arguments: argparse.Namespace) -> float:
    engine = make_engine(arguments)
    meter = Meter(engine, arguments.streams, arguments.blocks)
    host = EngineHost(meter)  # type: ignore[arg-type]
    Tap(host, meter)
    limits = Limits(Role.PLAIN, 100, 2048, engine.layout.num_pages, engine.layout.page_size)
    front = WorkerFront(
        host, limits, Description("bench", "m", "0", common_pb2.KVFingerprint()), grammars=Grammars(Path(), 100), max_rooms=4096, tracer=NoOpTracer()
    )
    server = GrpcServer("127.0.0.1", 0, options=SERVER_OPTIONS)
    add_services(server, front, Role.PLAIN)
    await server.start()
    front.start()
    client = await asyncio.create_subprocess_exec(sys.executable, __file__, "--client", server.address, "--streams", str(arguments.streams))
    try:
        await asyncio.to_thread(meter.done.wait)
    finally:
        client.kill()
        await client.wait()
        await server.stop()
        await front.close()
    return report(meter, arguments)


def make_engine(arguments: argparse.Namespace) -> Engine | SleepingEngine:
    if arguments.sleep_ms:
        return SleepingEngine(arguments.streams, arguments.sleep_ms / 1e3)
    config = EngineConfig(num_pages=arguments.streams * -(-(PROMPT_TOKENS + MAX_TOKENS + 1) // 16), num_threads=arguments.threads)
    return Engine(Role.PLAIN, load_model(arguments.model), config)


def report(meter: Meter, arguments: argparse.Namespace) -> float:
    pairs = [
        busy / alone
        for (on, busy), (_, before), (_, after) in zip(meter.blocks[1:], meter.blocks, meter.blocks[2:], strict=False)
        if on
        for alone in [(before + after) / 2]
    ]
    alone_ms = statistics.median(took for on, took in meter.blocks if not on) * 1e3
    busy_ms = statistics.median(took for on, took in meter.blocks if on) * 1e3
    low, middle, high = statistics.quantiles(pairs, n=4)
    print(f"{arguments.model or 'sleeping engine'}: {arguments.streams} streams, {arguments.threads} engine thread(s), {meter.steps} steps")
    print(f"step alone {alone_ms:.3f} ms, with a busy front {busy_ms:.3f} ms")
    cpu_ms = statistics.median(took for on, took in meter.front_cpu if on) / STEPS_A_BLOCK * 1e3
    print(f"the front's thread used {cpu_ms:.3f} ms of processor a step: {cpu_ms / alone_ms:.2%} of a step is the most that its lock can cost")
    print(f"ratio {middle:.4f} (quartiles {low:.4f} to {high:.4f}), limit {LIMIT}")
    return middle


async def drive(address: str, num_streams: int) -> None:
    """The gateway's side: opens the rooms, reads every report, and sends what must be refused."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(worker_pb2.Command(attach=worker_pb2.Attach(gateway_id="bench", gateway_address="-")))
        for room in range(1, num_streams + 1):
            await call.write(worker_pb2.Command(start=start(room, PROMPT_TOKENS, MAX_TOKENS)))

        async def refuse() -> None:
            room = 1 << 40
            while True:
                await asyncio.sleep(1 / REFUSED_A_SECOND)
                room += 1
                await call.write(worker_pb2.Command(start=start(room, REFUSED_PROMPT_TOKENS, 1 << 20)))

        refusing = asyncio.create_task(refuse())
        while await call.read() is not grpc.aio.EOF:
            pass
        refusing.cancel()


def start(room: int, num_tokens: int, max_tokens: int) -> worker_pb2.Start:
    sampling = worker_pb2.Sampling(top_p=1.0, max_tokens=max_tokens)
    return worker_pb2.Start(room=room, prompt_token_ids=[(room + i) % 100 for i in range(num_tokens)], sampling=sampling, plain=worker_pb2.PlainLeg())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="Hugging Face folder")
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="no model: each step sleeps this long")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=41)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        asyncio.run(drive(arguments.client, arguments.streams))
        return 0
    if bool(arguments.model) == bool(arguments.sleep_ms):
        parser.error("give a model folder or --sleep-ms")
    configure_logs(LogSettings(level="error"), service="bench", instance_id="bench")
    ratio = asyncio.run(serve(arguments))
    return 1 if arguments.strict and ratio > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
