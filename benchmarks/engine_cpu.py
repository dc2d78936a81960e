"""The engine beside `transformers` on a CPU: same weights, same threads, one process, in turns.

    python benchmarks/engine_cpu.py MODEL_FOLDER [--threads N] [--rounds N] [--strict]

First the greedy tokens of both are compared; then each cell is measured in interleaved rounds, and the median of the rounds' ratios is
printed beside its target and quartiles. With --strict the exit status is 1 when a target is missed; unequal tokens always give 1.
The floor of a decode step is the weights' bytes over the read bandwidth measured in the same run: at one stream no step can be faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from baton.bench import compare
from baton.engine import Engine, EngineConfig, Request, Role, SamplingParams, load_model
from baton.engine.types import Token

PREFILL_TOKENS = 1024
READ_BYTES = 256 << 20


@dataclass
class Timing:
    """first_s: until every sequence has its first token. step_s: mean time of a decode step after that."""

    first_s: float
    step_s: float
    tokens: list[list[int]]


class Ours:
    """A plain engine; a fresh one for each measurement, so that no pool is warmer than another."""

    def __init__(self, folder: str) -> None:
        self._model = load_model(folder)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Timing:
        config = EngineConfig(num_pages=2048, max_num_batched_tokens=PREFILL_TOKENS)
        engine = Engine(Role.PLAIN, self._model, config)
        tokens: list[list[int]] = [[] for _ in prompts]
        started = first = time.perf_counter()
        for room, prompt in enumerate(prompts):
            engine.add(Request(room, prompt, SamplingParams(max_tokens=num_tokens)))
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, Token):
                    tokens[event.room].append(event.token)
            if not all(tokens) or sum(map(len, tokens)) == len(tokens):
                first = time.perf_counter()
        return Timing(first - started, (time.perf_counter() - first) / max(1, num_tokens - 1), tokens)


class Theirs:
    """transformers' generate with its default (dynamic) cache and attention."""

    def __init__(self, folder: str) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Timing:
        ids = torch.tensor(prompts)
        stamps: list[float] = []

        def stamp(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            stamps.append(time.perf_counter())
            return scores

        started = time.perf_counter()
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, logits_processor=[stamp]
        )
        step_s = (time.perf_counter() - stamps[0]) / max(1, num_tokens - 1)
        return Timing(stamps[0] - started, step_s, out[:, ids.shape[1] :].tolist())


def read_bandwidth() -> float:
    """Bytes a second, best of several: what a decode step at one stream cannot beat."""
    block = torch.ones(READ_BYTES // 4)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - started)
    return READ_BYTES / best


def weights_bytes(model: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


@dataclass
class Runs:
    """timings[cell][0] are ours, [1] theirs, in the order of the rounds."""

    timings: dict[str, tuple[list[Timing], list[Timing]]]
    bandwidths: list[float]

    def rates(self, cell: str, side: int, rate: Callable[[Timing], float]) -> list[float]:
        return [rate(timing) for timing in self.timings[cell][side]]


def measure(cells: dict[str, list[list[int]]], ours: Ours, theirs: Theirs, lengths: dict[str, int], num_rounds: int) -> Runs:
    runs = Runs({name: ([], []) for name in cells}, [])
    for _ in range(num_rounds):
        runs.bandwidths.append(read_bandwidth())
        for name, prompts in cells.items():
            for side, system in enumerate((ours, theirs)):
                runs.timings[name][side].append(system.generate(prompts, lengths[name]))
    return runs


def prefill_rate(timing: Timing) -> float:
    return PREFILL_TOKENS / timing.first_s


def decode_rate(timing: Timing) -> float:
    return len(timing.tokens) / timing.step_s


def row(name: str, unit: str, ours: list[float], theirs: list[float], target: float) -> bool:
    """Values are rates (more is better); prints one line and says whether the target is met."""
    result = compare(ours, theirs)
    met = result.ratio >= target
    quartiles = f"{result.ratio_low:.2f} to {result.ratio_high:.2f}"
    rates = f"{name:<34}{result.subject:>9.1f}{result.baseline:>14.1f} {unit:<9}"
    print(f"{rates}{result.ratio:>7.2f}x  {quartiles:<14}{target:>5.2f}x  {'met' if met else 'MISSED'}", flush=True)
    return met


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    ids: list[list[int]] = torch.randint(3, vocab_size, (count, length), generator=torch.Generator().manual_seed(count * length)).tolist()
    return ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of the decode cells")
    parser.add_argument("--answer-tokens", type=int, default=48, help="of the decode cells")
    parser.add_argument("--strict", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    ours, theirs = Ours(given.folder), Theirs(given.folder)
    vocab_size = theirs.model.config.vocab_size

    cells = {
        "one": random_prompts(1, given.prompt_tokens, vocab_size),
        "sixteen": random_prompts(16, given.prompt_tokens, vocab_size),
        "long": random_prompts(1, PREFILL_TOKENS, vocab_size),
    }
    lengths = {"one": given.answer_tokens, "sixteen": given.answer_tokens, "long": 1}
    for name, prompts in cells.items():
        if ours.generate(prompts, lengths[name]).tokens != theirs.generate(prompts, lengths[name]).tokens:
            print(f"{name}: our greedy tokens are not those of transformers; nothing is measured")
            return 1
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"greedy tokens equal in every cell; {given.threads} threads, {given.rounds} rounds, {versions}", flush=True)

    heading = f"{'':<34}{'ours':>9}{'transformers':>14} {'':<9}{'ratio':>8}  {'quartiles':<14}{'target':>6}"
    print(heading, flush=True)
    long = measure({"long": cells["long"]}, ours, theirs, lengths, given.rounds)
    met = [row(f"prefill, {PREFILL_TOKENS} tokens", "tokens/s", *(long.rates("long", side, prefill_rate) for side in (0, 1)), 1.0)]
    short = measure({"one": cells["one"], "sixteen": cells["sixteen"]}, ours, theirs, lengths, given.rounds)
    single, batch = short.rates("one", 0, decode_rate), short.rates("sixteen", 0, decode_rate)
    met += [
        row("decode, 1 stream", "tokens/s", single, short.rates("one", 1, decode_rate), 1.0),
        row("decode, 16 streams", "tokens/s", batch, short.rates("sixteen", 1, decode_rate), 1.0),
        row("16 streams against our 1 stream", "tokens/s", batch, single, 4.0),
    ]
    bandwidths = short.bandwidths
    size = weights_bytes(theirs.model)
    floor_s = size / max(bandwidths)
    print(
        f"floor of a step at 1 stream: {size / 1e6:.0f} MB of weights at {max(bandwidths) / 1e9:.1f} GB/s = {1000 * floor_s:.1f} ms; "
        f"ours {1000 / max(single):.1f} ms at best, {1 / (max(single) * floor_s):.2f}x the floor"
    )
    return 0 if all(met) or not given.strict else 1


if __name__ == "__main__":
    sys.exit(main())
