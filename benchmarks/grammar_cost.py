"""What holding answers to a schema costs an engine: compiling it, a mask, and a decode step of held rows beside one of free rows.

    python benchmarks/grammar_cost.py MODEL_FOLDER [--rows 8] [--rounds 7]

Steps are interleaved: free and held rounds take turns in one process, and each round's median step counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path

import torch

from baton.engine import Engine, EngineConfig, Request, Role, SamplingParams, load_model
from baton.engine.grammar import Grammar, Grammars
from baton.engine.types import Failed, Finished

ITEM = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "name": {"type": "string", "maxLength": 30}, "open": {"type": "boolean"}},
    "required": ["id", "name", "open"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": r"( ?|\n {0,24})"},
}
#: Long enough that no answer here comes to its end.
SCHEMA = {"type": "array", "minItems": 100, "items": ITEM}
TEXT = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
NUM_TOKENS = 24


class Rounds:
    def __init__(self, engine: Engine, grammar: Grammar, num_rows: int) -> None:
        self._engine = engine
        self._grammar = grammar
        self._num_rows = num_rows
        self._rooms = itertools.count(1)
        self._steps: list[tuple[float, int, int]] = []
        engine.on_step(lambda took_s, sequences, tokens: self._steps.append((took_s, sequences, tokens)))

    def step_s(self, held: bool) -> float:
        """The median step in which all rows decode."""
        self._steps.clear()
        for row in range(self._num_rows):
            constraint = self._grammar.constraint() if held else None
            sampling = SamplingParams(temperature=1.0, seed=row, max_tokens=NUM_TOKENS, grammar=constraint)
            self._engine.add(Request(next(self._rooms), [504, 28, 1000 + row, 3], sampling))
        left = self._num_rows
        while left:
            ended = [event for event in self._engine.step() if isinstance(event, (Finished, Failed))]
            assert not [event for event in ended if isinstance(event, Failed)], ended
            left -= len(ended)
        return statistics.median(took_s for took_s, *rows in self._steps if rows == [self._num_rows, self._num_rows])


def mask_times_s(grammar: Grammar, num_tokens: int = 300) -> list[float]:
    """Of a walk through the grammar by tokens that are drawn evenly from what it allows."""
    constraint, rng = grammar.constraint(), random.Random(1)
    answer: list[int] = []
    times = []
    for _ in range(num_tokens):
        constraint.begin(answer, 0)
        began = time.perf_counter()
        constraint.make()
        times.append(time.perf_counter() - began)
        answer.append(int(rng.choice((~constraint.forbidden()).nonzero()[0])))
    assert not constraint.fault, constraint.fault
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(arguments.model)
    grammars = Grammars(arguments.model, model.config.vocab_size)
    for what in ("the first grammar, the tokenizer read", "the next"):
        began = time.perf_counter()
        grammar = grammars.compile(TEXT if what == "the next" else "start: /[0-9]+/")
        print(f"compiled, {what}: {(time.perf_counter() - began) * 1e3:.1f} ms")
    times = mask_times_s(grammar)
    print(
        "mask, µs: "
        + ", ".join(f"{name} {times[int(len(times) * part)] * 1e6:.0f}" for name, part in (("median", 0.5), ("90 %", 0.9), ("most", 0.999)))
    )
    engine = Engine(Role.PLAIN, model, EngineConfig(num_pages=1000, page_size=16, max_running=arguments.rows))
    rounds = Rounds(engine, grammar, arguments.rows)
    rounds.step_s(held=False), rounds.step_s(held=True)
    pairs = [(rounds.step_s(held=False), rounds.step_s(held=True)) for _ in range(arguments.rounds)]
    ratios = sorted(held / free for free, held in pairs)
    free_ms = statistics.median(free for free, _ in pairs) * 1e3
    print(
        f"step of {arguments.rows} rows, free: {free_ms:.1f} ms; held / free: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )
    engine.close()


if __name__ == "__main__":
    main()
