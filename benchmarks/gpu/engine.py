"""The engine on one GPU at the geometry of a model, dummy weights: decode steps and a long prefill, beside their floors.

    python benchmarks/gpu/engine.py --model PATH_OF_A_FOLDER_WITH_config.json [--json FILE]

A decode step's floor is reading the weights and the KV pages once at the bandwidth of a copy, measured first; a prefill's is its operations at
the rate of large matrix products that take as long and run in turns with it: under load a GPU's clock falls, for both alike. The rate of a few
products on a cool GPU is printed beside. Every time is of the whole engine: scheduling, launches, sampling, tokens read by the host.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from floor import Floor, MatrixProduct, measure_floor

import baton.engine.device.steps as steps
from baton.engine import Engine, EngineConfig, ModelConfig, Request, Role, SamplingParams, prepare
from baton.engine.types import Finished, Token

STEP_TARGET, PREFILL_TARGET, HOST_TARGET_MS, IDLE_TARGET = 1.25, 0.80, 1.0, 0.03
CONTEXT, PROMPT, SHORT = 2048, 8192, (64, 256, 512, 1024)
NUM_STEPS = 48


class HostClock:
    """Time that the host spends in the parts of a step that do not wait for the device."""

    def __init__(self, engine: Engine) -> None:
        self.spent_s = 0.0
        for owner, names in ((engine._scheduler, ("poll", "plan", "advance", "resolve", "take_events")), (engine._runner, ("launch",))):
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call):
        def timed(*given):
            start = time.perf_counter()
            try:
                return call(*given)
            finally:
                self.spent_s += time.perf_counter() - start

        return timed


class Gaps:
    """What part of the time the device was not in a decode step: between the end of one and the start of the next. Copies of a few bytes that lie
    there, of drawn tokens and of new pages, count as idle."""

    def __init__(self, engine: Engine) -> None:
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._run = engine._runner._steps.run
        engine._runner._steps.run = self._marked

    def _marked(self, seats: list[int]) -> torch.Tensor:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        drawn = self._run(seats)
        end.record()
        self.marks.append((start, end))
        return drawn

    def idle(self) -> float:
        torch.cuda.synchronize()
        pairs = list(pairwise(self.marks))
        between = sum(end.elapsed_time(start) for (_, end), (start, _) in pairs)
        return between / self.marks[0][0].elapsed_time(self.marks[-1][0])


def prompt(draw: random.Random, vocab_size: int, length: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(length)]


def drain(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def decode_step(engine: Engine, clock: HostClock, gaps: Gaps, batch: int, vocab_size: int) -> tuple[float, float, float]:
    """(seconds of a step, seconds of it that the host worked, part of the time that the device was idle between steps), the batch decoding and
    nothing else."""
    draw = random.Random(batch)
    for room in range(batch):
        engine.add(Request(room + 1, prompt(draw, vocab_size, CONTEXT - NUM_STEPS // 2), SamplingParams(max_tokens=NUM_STEPS + 16)))
    started: dict[int, int] = {}
    while len(started) < batch or min(started.values()) < 4:
        for event in engine.step():
            if isinstance(event, Token):
                started[event.room] = event.index
    steps, clock.spent_s = engine.stats().steps, 0.0
    torch.cuda.synchronize()
    gaps.marks.clear()
    begin = time.perf_counter()
    while engine.stats().steps < steps + NUM_STEPS - 16:
        engine.step()
    took = time.perf_counter() - begin
    done = engine.stats().steps - steps
    host, idle = clock.spent_s, gaps.idle()
    drain(engine)
    return took / done, host / done, idle


def graph_step(engine: Engine, batch: int) -> float:
    """Seconds of device time of the captured step alone, replayed back to back on padding seats."""
    steps = engine._runner._steps
    size = next(size for size in steps._sizes if size >= batch)
    graph = steps._graphs[size]
    with torch.cuda.stream(engine._runner._stream):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            graph.replay()
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e4


def prefill(engine: Engine, vocab_size: int, length: int, rounds: int = 5, between: Callable[[], object] = lambda: None) -> float:
    """Seconds from the request to its only token, the median. between: called before each."""
    draw = random.Random(0)
    spans = []
    for room in range(rounds + 1):
        tokens = prompt(draw, vocab_size, length)
        between()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.add(Request(1000 + room, tokens, SamplingParams(max_tokens=1)))
        while not any(isinstance(event, Finished) for event in engine.step()):
            pass
        if room:
            spans.append(time.perf_counter() - begin)
    return sorted(spans)[len(spans) // 2]


def profiled(engine: Engine, vocab_size: int, batch: int) -> str:
    """Where the device's time goes: the kernels of one prefill, or of a few decode steps, by their sum."""
    draw = random.Random(1)
    length, tokens = (PROMPT, 1) if batch == 0 else (CONTEXT, 24)
    for room in range(max(batch, 1)):
        engine.add(Request(5000 + room, prompt(draw, vocab_size, length), SamplingParams(max_tokens=tokens)))
    if batch:
        for _ in range(6 + 2 * batch):
            engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        drain(engine)
        torch.cuda.synchronize()
    return profile.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=70)


def profiled_empty(engine: Engine, batch: int) -> str:
    """The same of captured steps whose seats are all padding."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph_step(engine, batch)
    return profile.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=70)


def model_flops(config, num_tokens: int) -> float:
    """Operations of a prompt's forward pass: the layers' products for every token, causal attention, the head for one token."""
    attention = config.num_heads * config.head_dim * 2 + config.num_kv_heads * config.head_dim * 2
    layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    pairs = 2 * num_tokens**2 * config.num_heads * config.head_dim
    return config.num_layers * (2 * num_tokens * layer + pairs) + 2 * config.hidden_size * config.vocab_size


@contextmanager
def stage(name: str):
    begin = time.monotonic()
    yield
    print(f"# {name}: {time.monotonic() - begin:.1f} s", flush=True)


def report(name: str, measured: float, floor: float, target: float, unit: str, good: bool, found: list[dict]) -> None:
    found.append({"name": name, "measured": measured, "floor": floor, "target": target, "unit": unit, "met": good})
    ratio = measured / floor
    print(f"{name:<40} {measured:9.3f} {unit}  floor {floor:9.3f}  ratio {ratio:6.3f}  target {target:<5} {'met' if good else 'MISSED'}", flush=True)


def measure(engine: Engine, config: ModelConfig, floor: Floor, batches: list[int], found: list[dict]) -> None:
    clock, gaps = HostClock(engine), Gaps(engine)
    layer = 2 * config.num_heads * config.head_dim + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size
    weights = config.hidden_size * (config.vocab_size + config.num_layers * layer)
    for batch in batches:
        step_s, host_s, idle = decode_step(engine, clock, gaps, batch, config.vocab_size)
        bound = (2 * weights + batch * CONTEXT * engine.layout.token_bytes) / floor.copy_bytes_per_s
        report(f"decode step, batch {batch}", step_s * 1e3, bound * 1e3, STEP_TARGET, "ms", step_s <= STEP_TARGET * bound, found)
        report(f"  host's part, batch {batch}", host_s * 1e3, HOST_TARGET_MS, 1.0, "ms", host_s * 1e3 <= HOST_TARGET_MS, found)
        report(f"  device idle between steps, batch {batch}", 100 * idle, 100.0, 100 * IDLE_TARGET, " %", idle <= IDLE_TARGET, found)
        print(f"  captured step on empty seats, batch {batch}: {graph_step(engine, batch) * 1e3:.3f} ms", flush=True)
    for length in SHORT:
        took_ms = 1e3 * prefill(engine, config.vocab_size, length)
        found.append({"name": f"prefill of {length}, ms", "measured": took_ms, "unit": "ms", "met": True})
        print(f"prefill of {length} tokens: {took_ms:.2f} ms", flush=True)
    product, flops = MatrixProduct("cuda:0"), model_flops(config, PROMPT)
    rates: list[float] = []
    took = prefill(engine, config.vocab_size, PROMPT, between=lambda: rates.append(product.flops_over(flops)))
    rate, bound = flops / took, median(rates)
    found.append({"name": "prefill, ms", "measured": took * 1e3, "unit": "ms", "met": True})
    print(f"prefill of {PROMPT} tokens: {took * 1e3:.1f} ms; a few products alone {floor.matrix_flops / 1e12:.0f} TFLOP/s", flush=True)
    report("prefill, part of the matrix rate", rate / 1e12, bound / 1e12, PREFILL_TARGET, "TFLOP/s", rate >= PREFILL_TARGET * bound, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="also print where the device's time goes")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--unchained", action="store_true", help="no launch of a step is set up while the one before it drains")
    given = parser.parse_args()
    if given.unchained:
        steps.can_chain = lambda device: False
    batches = [int(each) for each in given.batches.split(",")]
    with stage("floors"):
        floor = measure_floor()
    print(f"copy {floor.copy_bytes_per_s / 1e12:.2f} TB/s, matrix product {floor.matrix_flops / 1e12:.0f} TFLOP/s")
    settings = EngineConfig(
        dtype="bfloat16", max_running=max(batches), max_num_batched_tokens=PROMPT, max_model_len=PROMPT + 64, kv_bytes=40 << 30,
        deterministic=given.deterministic,
    )  # fmt: skip
    with stage("weights"):
        prepared = prepare(given.model, settings, Role.PLAIN, device="cuda:0", load_format="dummy")
    with stage("engine: kernels compiled, steps captured"):
        engine = Engine(Role.PLAIN, prepared.model, prepared.config, pool=prepared.device_pool())
    found: list[dict] = []
    measure(engine, prepared.model.config, floor, batches, found)
    if given.profile:
        for batch in (0, *batches):
            print(f"--- {'prefill' if batch == 0 else f'decode, batch {batch}'}\n{profiled(engine, prepared.model.config.vocab_size, batch)}")
            if batch:
                print(f"--- empty seats, batch {batch}\n{profiled_empty(engine, batch)}")
    if given.json:
        given.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "found": found}, indent=1))
    return 0 if all(each["met"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
