"""What the console costs a gateway: its processor time a request, without a console, with one, and with one that is watched; in turns.

    python benchmarks/console_cost.py [--turns 15] [--requests 400] [--tokens 32] [--strict]

Real gateway processes stand before one scripted plain server (services/gateway/tests), which computes nothing: what a gateway does for a request is
all there is, so its share is as large as it can be. Turns alternate, so that whatever else the machine does falls on all; the median of the ratios to
the turn without is printed with its quartiles. With --strict the exit status is 1 when recording takes more than 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "services" / "gateway" / "tests"))

from gateway_model import make_model_folder
from gateway_worker import ScriptedWorker, Shared

from baton.gateway.model_folder import read_model_folder
from baton.gateway.tokenizer import PromptTokenizer
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import console_pb2, console_pb2_grpc
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

LIMIT = 0.02
MODEL = "tiny"
CLIENTS = 16
KINDS = {"none": ("--no-console",), "recorded": (), "watched": ()}


class Gateway:
    """One process, and the processor time that it takes."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process, self.address = process, address
        self._usage = psutil.Process(process.pid)
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    def cpu_s(self) -> float:
        times = self._usage.cpu_times()
        return float(times.user + times.system)

    async def watch(self) -> None:
        async for _ in console_pb2_grpc.ConsoleStub(self.channel).Watch(console_pb2.WatchRequest()):
            pass

    async def turn(self, num: int, tokens: int) -> float:
        """Milliseconds of processor time a request."""
        stub, waiting = InferenceStub(self.channel), iter(range(num))
        before = self.cpu_s()

        async def client() -> None:
            for _ in waiting:
                sampling = pb.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                async for _ in stub.Generate(pb.GenerateRequest(model=MODEL, text="hello", sampling=sampling)):
                    pass

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return (self.cpu_s() - before) / num * 1e3

    async def stop(self) -> None:
        await self.channel.close()
        self.process.terminate()
        await self.process.wait()


async def start(folder: Path, model: Path, server: str, kind: str) -> Gateway:
    ready = folder / f"{kind}.json"
    flags = ["--port", "0", "--http-port", "0", "--model-path", str(model), "--model-name", MODEL, "--plain", server, "--log-level", "warning"]
    command = [sys.executable, "-m", "baton.gateway.app", *flags, "--ready-file", str(ready), *KINDS[kind]]
    process = await asyncio.create_subprocess_exec(*command)
    deadline = time.monotonic() + 60
    while not ready.exists():
        if process.returncode is not None or time.monotonic() > deadline:
            raise SystemExit(f"the gateway ({kind}) did not start")
        await asyncio.sleep(0.05)
    return Gateway(process, json.loads(ready.read_text())["addresses"]["grpc"])


async def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    async with AsyncExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        model = make_model_folder(folder / "tiny")
        vocab_size = PromptTokenizer(read_model_folder(model)).vocab_size
        server = await ScriptedWorker(
            "plain", Shared(lambda _: [40 + i % 200 for i in range(arguments.tokens)]), "plain-0", vocab_size=vocab_size
        ).start()
        undo.push_async_callback(server.kill)
        gateways = {}
        for kind in KINDS:
            gateways[kind] = await start(folder, model, server.address, kind)
            undo.push_async_callback(gateways[kind].stop)
        await asyncio.sleep(2)  # they find the server
        for gateway in gateways.values():
            await gateway.turn(arguments.requests, arguments.tokens)
        watching = asyncio.create_task(gateways["watched"].watch())
        turns: dict[str, list[float]] = {kind: [] for kind in KINDS}
        began = time.monotonic()
        for turn in range(arguments.turns):
            for kind, gateway in gateways.items():
                turns[kind].append(await gateway.turn(arguments.requests, arguments.tokens))
            took = ", ".join(f"{kind} {each[-1]:.3f} ms" for kind, each in turns.items())
            print(f"# turn {turn + 1} of {arguments.turns}, {time.monotonic() - began:.0f} s: {took}", flush=True)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return turns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--requests", type=int, default=400, help="of each turn")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--strict", action="store_true")
    arguments = parser.parse_args()
    turns = asyncio.run(measure(arguments))
    lost = 0.0
    print(f"no console: {statistics.median(turns['none']):.3f} ms of processor time a request of {arguments.tokens} tokens")
    for kind in ("recorded", "watched"):
        low, middle, high = statistics.quantiles([mine / none for mine, none in zip(turns[kind], turns["none"], strict=True)], n=4)
        print(f"{kind}: {statistics.median(turns[kind]):.3f} ms, {middle:.4f} of it (quartiles {low:.4f} to {high:.4f}), {arguments.turns} turns")
        lost = middle - 1 if kind == "recorded" else lost
    return 1 if arguments.strict and lost > LIMIT else 0


if __name__ == "__main__":
    raise SystemExit(main())
