"""What a chunk of a prompt costs beside decode rows in one plain engine: the host's launch and the device's time of each step.

    python benchmarks/gpu/chunks.py --model PATH_OF_A_FOLDER_WITH_config.json [--chunk 512]

A step launches its decode rows (a captured graph) and then its chunk (layer by layer). When the host takes longer to launch a chunk than the device
to compute it, the device waits, and streams with it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton.engine import Engine, EngineConfig, Request, Role, SamplingParams, prepare
from baton.engine.types import Token

ROWS, CONTEXT, PROMPT = 16, 2048, 8192


@dataclass
class Step:
    """begin, end: events on the device around all that the step launched. rows, prompt_tokens: what it computed."""

    rows: int
    prompt_tokens: int
    launch_ms: float
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def device_ms(self) -> float:
        return self.begin.elapsed_time(self.end)


@dataclass
class Watch:
    """Stands around the launch of every step."""

    engine: Engine
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._launch = self.engine._runner.launch
        self.engine._runner.launch = self._watched

    def _watched(self, plan, *given):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self.engine._runner._stream
        begin.record(stream)
        started = time.perf_counter()
        flight = self._launch(plan, *given)
        took = time.perf_counter() - started
        end.record(stream)
        prompts = [piece.count for piece in plan.slices if piece.count > 1]
        self.steps.append(Step(len(plan.slices) - len(prompts), sum(prompts), 1e3 * took, begin, end))
        return flight


def first_tokens(engine: Engine, rooms: set[int]) -> None:
    while rooms:
        rooms -= {event.room for event in engine.step() if isinstance(event, Token)}


def spans(name: str, values: list[float]) -> str:
    ordered = sorted(values)
    return f"{name} {statistics.median(ordered):6.2f} ms (least {ordered[0]:.2f}, most {ordered[-1]:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    settings = EngineConfig(
        dtype="bfloat16", max_running=ROWS + 1, max_num_batched_tokens=given.chunk + ROWS, max_model_len=PROMPT + 64, kv_bytes=16 << 30,
    )  # fmt: skip
    prepared = prepare(given.model, settings, Role.PLAIN, device=given.device, load_format="dummy")
    engine = Engine(Role.PLAIN, prepared.model, prepared.config, pool=prepared.device_pool())
    engine.warm_up()
    watch, draw, vocab = Watch(engine), random.Random(0), prepared.model.config.vocab_size

    def prompt(length: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(length)]

    for room in range(1, ROWS + 1):
        engine.add(Request(room, prompt(CONTEXT), SamplingParams(max_tokens=2000)))
    first_tokens(engine, set(range(1, ROWS + 1)))
    for turn in range(given.prompts):
        watch.steps.clear()
        begin = time.perf_counter()
        engine.add(Request(100 + turn, prompt(PROMPT), SamplingParams(max_tokens=1)))
        first_tokens(engine, {100 + turn})
        took = 1e3 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        mixed = [step for step in watch.steps if step.prompt_tokens]
        between = [a.end.elapsed_time(b.begin) for a, b in zip(watch.steps, watch.steps[1:], strict=False)]
        print(
            f"prompt {turn + 1} of {PROMPT} tokens in {len(mixed)} chunks: {took:.1f} ms, rows beside it {[step.rows for step in mixed]}", flush=True
        )
        print("  " + spans("host's launch", [step.launch_ms for step in mixed]) + ", " + spans("device", [step.device_ms() for step in mixed])
              + ", " + spans("device idle between", between), flush=True)  # fmt: skip
    if given.json:
        found = [(step.rows, step.prompt_tokens, step.launch_ms, step.device_ms()) for step in watch.steps]
        given.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "steps": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
