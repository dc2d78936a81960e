"""Greedy answers of a real model in float32, on the CPU and on a GPU, token for token.

    python benchmarks/gpu/greedy.py --model FOLDER      # of `baton model fetch smollm2`

24 prompts of 1 to 3,000 tokens, 64 tokens each, all at once, prompts in chunks. Exits with the number of answers that differ.
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import zip_longest
from pathlib import Path

import torch
from greedy_answers import answers as told
from transformers import AutoTokenizer

from baton.engine import Engine, EngineConfig, Role, prepare

NUM_TOKENS, LONGEST = 64, 3000
TEXTS = [
    "The capital of France is", "def fibonacci(n):\n    ", "1, 2, 3, 4,", "Once upon a time", "Water boils at", "Dear Sir or Madam,",
    "The three laws of", "import os\n", "Q: Why is the sky blue?\nA:", "Roses are red,", "In 1969,", "A relay race is",
]  # fmt: skip


def prompts(folder: Path) -> list[list[int]]:
    """Texts as they are, and sentences in a random order up to the longest."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draw = random.Random(0)
    found = [tokenizer(text).input_ids for text in TEXTS] + [[tokenizer.bos_token_id]]
    words = " ".join(TEXTS).split()
    for length in (16, 17, 100, 255, 256, 700, 1024, 1500, 2047, 2600, LONGEST):
        text = " ".join(draw.choice(words) for _ in range(length))
        found.append(tokenizer(text).input_ids[:length])
    return found


def answers(folder: Path, device: str, asked: list[list[int]], *, deterministic: bool) -> list[list[int]]:
    settings = EngineConfig(
        dtype="float32", max_running=32, max_num_batched_tokens=512, max_model_len=LONGEST + 128, kv_bytes=3 << 30,
        deterministic=deterministic and device != "cpu",
    )  # fmt: skip
    prepared = prepare(folder, settings, Role.PLAIN, device=device)
    engine = Engine(Role.PLAIN, prepared.model, prepared.config, pool=prepared.device_pool())
    return told(engine, asked, NUM_TOKENS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    asked = prompts(given.model)
    expected = answers(given.model, "cpu", asked, deterministic=False)
    worst = 0
    for deterministic in (False, True):
        found = answers(given.model, given.device, asked, deterministic=deterministic)
        differ = [room for room in range(len(asked)) if found[room] != expected[room]]
        mode = "deterministic mode" if deterministic else "usual mode"
        print(f"{mode}: {len(asked) - len(differ)} of {len(asked)} answers of {NUM_TOKENS} tokens are the CPU's", flush=True)
        for room in differ:
            place = next(i for i, (ours, theirs) in enumerate(zip_longest(found[room], expected[room])) if ours != theirs)
            print(f"  prompt of {len(asked[room])} tokens: from token {place} on {found[room][place:][:4]}, on the CPU {expected[room][place:][:4]}")
        worst = max(worst, len(differ))
    print(f"on {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
