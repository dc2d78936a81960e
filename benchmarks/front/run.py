"""What the gateway adds to a request's first token, and how many tokens a core of it forwards.

    python benchmarks/front/run.py MODEL_FOLDER [--smg smg] [--strict]

Behind it stands a server that answers at once (stand_in.py): 256 streams on average, Poisson arrivals, every stream a token each 50 ms. The same
client asks that server directly, through a forwarder that passes bytes on and decides nothing (forwarder.py: what grpc.aio alone adds), through the
gateway over gRPC and over HTTP, and, where `--smg` names its command, through the smg gateway of SGLang (its own contract, the same answers), in
turns. The difference of the percentiles is what a gateway adds. Then every stream gets 8 tokens
each 20 ms, more than can be forwarded: tokens that arrived over the gateway's processor time. Client, server and gateway share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from baton.bench import Asking, Limits, open_target
from baton.bench.arrivals import Arrivals, ClosedLoop, PoissonArrivals
from baton.bench.generator import Generator, Measured
from baton.bench.percentiles import Percentiles
from baton.bench.workload.fixed import FixedLengths
from baton.cli.services import ServiceSpec, Supervisor

HERE = Path(__file__).parent
P50_TARGET_MS, P99_TARGET_MS, TOKENS_TARGET = 2.0, 10.0, 20_000
STREAMS, STEP_MS, ANSWER = 256, 50.0, 64
FAST_STEP_MS, FAST_TOKENS, FAST_ANSWER = 20.0, 8, 512


@dataclass
class Contestant:
    """pid: of the gateway under test; None where there is none."""

    name: str
    url: str
    model: str
    pid: int | None
    ttft_ms: list[Percentiles] = field(default_factory=list)
    gap_p99_ms: list[float] = field(default_factory=list)
    tokens_a_core: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    errors: int = 0


@contextmanager
def helper(script: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """Its port and its process id."""
    process = subprocess.Popen([sys.executable, str(HERE / script), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["port"], process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def smg(command: str, port: int, model: Path) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as probe, socket.create_server(("127.0.0.1", 0)) as metrics:
        own, own_metrics = probe.getsockname()[1], metrics.getsockname()[1]
    flags = ["--worker-urls", f"grpc://127.0.0.1:{port}", "--model-path", str(model), "--port", str(own), "--prometheus-port", str(own_metrics)]
    process = subprocess.Popen([command, "launch", "--host", "127.0.0.1", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{own}/readiness")
        yield f"http://127.0.0.1:{own}/v1", process.pid
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def contestants(stack: ExitStack, model: Path, run_dir: Path, smg_command: str | None, *flags: str) -> list[Contestant]:
    port, _ = stack.enter_context(helper("stand_in.py", str(model), *flags))
    bare, bare_pid = stack.enter_context(helper("forwarder.py", f"127.0.0.1:{port}"))
    supervisor = stack.enter_context(Supervisor(run_dir, 5.0))
    command = (sys.executable, "-m", "baton.gateway.app", "--port", "0", "--http-port", "0", "--model-path", str(model), "--model-name", "stand-in")
    service = supervisor.start(ServiceSpec("gateway", (*command, "--plain", f"127.0.0.1:{port}")))
    ready = supervisor.wait_ready([service], 60)["gateway"]
    found = [
        Contestant("direct, gRPC", f"grpc://127.0.0.1:{port}", "stand-in", None),
        Contestant("bare forwarder", f"grpc://127.0.0.1:{bare}", "stand-in", bare_pid),
        Contestant("gateway, gRPC", f"grpc://{ready.addresses['grpc']}", "stand-in", ready.pid),
        Contestant("gateway, HTTP", f"http://{ready.addresses['http']}/v1", "stand-in", ready.pid),
    ]
    if smg_command:
        url, pid = stack.enter_context(smg(smg_command, port, model))
        found.append(Contestant("smg, HTTP", url, "stand-in", pid))
    return found


async def ask(contestant: Contestant, workload: FixedLengths, arrivals: Arrivals, num_requests: int, repeat: int) -> tuple[Measured, float, float]:
    """What came back, the gateway's processor seconds, and the seconds that it took."""
    target = open_target(contestant.url, "completions", Asking(contestant.model))
    process = psutil.Process(contestant.pid) if contestant.pid is not None else None
    before, begun = sum(process.cpu_times()[:2]) if process else 0.0, time.monotonic()
    try:
        generator = Generator(target, Limits(timeout_s=120), repeat, is_warm_up=False, on_done=lambda _: None)
        measured = await generator.run([workload.request(repeat * num_requests + index) for index in range(num_requests)], arrivals)
    finally:
        await target.aclose()
    used = sum(process.cpu_times()[:2]) - before if process else 0.0
    if process:
        contestant.rss_mb.append(process.memory_info().rss / 1e6)
    failed = [sample for sample in measured.samples if sample.error]
    contestant.errors += len(failed)
    if failed:
        print(f"{contestant.name}: {len(failed)} of {num_requests} failed, the first: {failed[0].error} {failed[0].error_detail[:200]}")
    return measured, used, time.monotonic() - begun


async def first_tokens(field: list[Contestant], rounds: int, num_requests: int) -> None:
    rate = STREAMS / (ANSWER * STEP_MS / 1e3)
    workload = FixedLengths(seed=1, prompt_words=64, answer_tokens=ANSWER)
    for turn in range(rounds):
        for contestant in field if turn % 2 == 0 else field[::-1]:
            measured, used, took = await ask(contestant, workload, PoissonArrivals(rate, seed=turn), num_requests, turn)
            good = [sample for sample in measured.samples if sample.first_s is not None]
            ttft = Percentiles.of([(sample.first_s or 0.0) - sample.sent_s for sample in good], 1e3)
            gaps = Percentiles.of([b - a for sample in good for a, b in zip(sample.token_s, sample.token_s[1:], strict=False)], 1e3)
            assert ttft is not None
            assert gaps is not None
            contestant.ttft_ms.append(ttft)
            contestant.gap_p99_ms.append(gaps.p99)
            lag = Percentiles.of(measured.loop_lag_s, 1e3)
            print(f"  {contestant.name:<14} TTFT p50 {ttft.p50:6.2f}  p99 {ttft.p99:7.2f} ms, gaps p99 {gaps.p99:6.1f} ms, "
                  f"gateway {100 * used / took:3.0f} % of a core, the client's own lag p99 {lag.p99 if lag else 0:.1f} ms", flush=True)  # fmt: skip


async def throughput(field: list[Contestant], rounds: int, num_requests: int) -> None:
    workload = FixedLengths(seed=2, prompt_words=16, answer_tokens=FAST_ANSWER)
    for turn in range(rounds):
        for contestant in field if turn % 2 == 0 else field[::-1]:
            if contestant.pid is None:
                continue
            measured, used, took = await ask(contestant, workload, ClosedLoop(STREAMS), num_requests, turn)
            tokens = sum(sample.num_tokens for sample in measured.samples)
            messages = sum(len(sample.token_s) for sample in measured.samples)
            contestant.tokens_a_core.append(tokens / used)
            print(f"  {contestant.name:<14} {tokens / took:8.0f} tokens/s, {tokens / used:8.0f} a core, {tokens / messages:.1f} tokens a message, "
                  f"gateway {100 * used / took:3.0f} % of a core, {contestant.rss_mb[-1]:.0f} MB", flush=True)  # fmt: skip


def verdict(slow: list[Contestant], fast: list[Contestant]) -> bool:
    floor, good = slow[0], True
    for contestant in slow[1:]:
        p50 = statistics.median(a.p50 - b.p50 for a, b in zip(contestant.ttft_ms, floor.ttft_ms, strict=True))
        p99 = statistics.median(a.p99 - b.p99 for a, b in zip(contestant.ttft_ms, floor.ttft_ms, strict=True))
        met = p50 <= P50_TARGET_MS and p99 <= P99_TARGET_MS and not contestant.errors
        print(f"{contestant.name:<14} adds {p50:5.2f} ms at p50 (target {P50_TARGET_MS}), {p99:6.2f} ms at p99 (target {P99_TARGET_MS}): {word(met)}")
        good = good and (met or contestant.name != "gateway, gRPC")
    for contestant in fast[1:]:
        rate, grown = statistics.median(contestant.tokens_a_core), contestant.rss_mb[-1] - contestant.rss_mb[0]
        met = rate >= TOKENS_TARGET and not contestant.errors
        print(f"{contestant.name:<14} forwards {rate:8.0f} tokens/s a core (target {TOKENS_TARGET}): {word(met)}; memory grew by {grown:.1f} MB")
        good = good and (met or contestant.name != "gateway, gRPC")
    return good


def word(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--smg", help="command of the smg gateway")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=800, help="a turn, of the first part")
    parser.add_argument("--fast-requests", type=int, default=512, help="a turn, of the second")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-front-") as folder:
        with ExitStack() as stack:
            print(f"{STREAMS} streams, a token each {STEP_MS:g} ms")
            slow = contestants(stack, given.model, Path(folder, "slow"), given.smg, "--step-ms", str(STEP_MS))
            asyncio.run(first_tokens(slow, given.rounds, given.requests))
        with ExitStack() as stack:
            print(f"{STREAMS} streams, {FAST_TOKENS} tokens each {FAST_STEP_MS:g} ms")
            flags = ("--step-ms", str(FAST_STEP_MS), "--tokens-a-step", str(FAST_TOKENS))
            fast = contestants(stack, given.model, Path(folder, "fast"), given.smg, *flags)
            asyncio.run(throughput(fast, given.rounds, given.fast_requests))
    good = verdict(slow, fast)
    return 0 if good or not given.strict else 1


if __name__ == "__main__":
    sys.exit(main())
