"""What others take for the same geometry on the same GPU: transformers (static cache, compiled) in this process, vLLM in one of its own.

    python benchmarks/gpu/peers.py --model benchmarks/gpu/qwen3-8b [--vllm-path FOLDER] [--json FILE]

--vllm-path: a folder to import vLLM from, kept apart from this environment. Random weights; prompts and batches as in engine.py. vLLM keeps its
engine in a process of its own, as it does by default; ours is timed in the process that asks: a part of a millisecond of a 64-token prompt is that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from floor import median_s

CONTEXT, PROMPT, BATCHES = 2048, 8192, (1, 16, 64)

#: Runs under vLLM's own import path: start-up, a long prefill, and steps as the difference between a long and a short answer.
VLLM = """
import json, random, sys, time
from vllm import LLM, SamplingParams

model, prompt_len, context, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
llm = LLM(
    model=model, skip_tokenizer_init=True, load_format="dummy", max_model_len=2 * prompt_len, gpu_memory_utilization=0.85,
    enable_prefix_caching=False,
)
draw = random.Random(0)

def seconds(batch, length, answer):
    prompts = [{"prompt_token_ids": [draw.randrange(1000, 100000) for _ in range(length)]} for _ in range(batch)]
    sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin

def median(count, *asked):
    return sorted(seconds(*asked) for _ in range(count))[count // 2]

seconds(1, prompt_len, 1), seconds(4, 256, 16)
found = {"prefill_ms": 1e3 * median(5, 1, prompt_len, 1)}
for length in (64, 256, 512, 1024):
    seconds(1, length, 1)
    found[f"prefill_{length}_ms"] = 1e3 * median(5, 1, length, 1)
for batch in batches:
    # The middle of what is timed has `context` tokens, as in engine.py.
    found[f"decode_{batch}_ms"] = 1e3 * (median(3, batch, context - 64, 129) - median(3, batch, context - 64, 1)) / 128
print("FOUND " + json.dumps(found))
"""


def vllm(model: Path, path: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(path), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    command = [sys.executable, "-c", VLLM, str(model), str(PROMPT), str(CONTEXT), json.dumps(BATCHES)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line.removeprefix("FOUND ") for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        raise SystemExit(f"vLLM ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(lines[0])


@torch.inference_mode()
def transformers(model: Path) -> dict[str, float]:
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    config = AutoConfig.from_pretrained(model)
    with torch.device("cuda:0"):
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    ids = torch.randint(0, config.vocab_size, (1, PROMPT), device="cuda:0")
    found = {"prefill_ms": 1e3 * median_s(lambda: theirs(ids, logits_to_keep=1), 5)}
    step = torch.compile(theirs, mode="reduce-overhead")
    for batch in BATCHES:
        cache = StaticCache(config=config, max_cache_len=CONTEXT + 64)
        # Made here: what the compiled step makes is its own, and the next one overwrites it.
        cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, torch.device("cuda:0"))
        tokens = torch.randint(0, config.vocab_size, (batch, 1), device="cuda:0")
        place = torch.tensor([CONTEXT], device="cuda:0")

        def run(tokens: torch.Tensor = tokens, cache: StaticCache = cache, place: torch.Tensor = place) -> None:
            torch.compiler.cudagraph_mark_step_begin()
            step(tokens, past_key_values=cache, cache_position=place, position_ids=place.expand(len(tokens), 1))

        run()
        run()
        found[f"decode_{batch}_ms"] = 1e3 * median_s(run, 10)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-path", type=Path)
    parser.add_argument("--without", default="", help="leave a peer out: transformers")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {}
    if given.vllm_path:
        found["vllm"] = vllm(given.model, given.vllm_path)
        print("vllm", found["vllm"], flush=True)
        keep(found, given.json)
    if given.without != "transformers":
        found["transformers"] = transformers(given.model)
        print("transformers", found["transformers"], flush=True)
        keep(found, given.json)
    return 0


def keep(found: dict[str, dict[str, float]], path: Path | None) -> None:
    """After each peer, so that one that fails does not take the others' figures with it."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
