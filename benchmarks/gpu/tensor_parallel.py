"""A model shared by the GPUs of one host: correct first, then its decode step beside its floor and beside one GPU alone.

    python benchmarks/gpu/tensor_parallel.py --model PATH_OF_A_FOLDER_WITH_config.json [--degree 2] [--json FILE]
    python benchmarks/gpu/tensor_parallel.py --model ... --dry        the same program on a CPU, with a small geometry: its numbers mean nothing

Dummy weights, which are the same at every degree. The floor of a step is reading each GPU's share of weights and KV pages once, at the bandwidth
of a copy on the slowest of the GPUs; what the collectives add is measured by themselves and printed beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from engine import CONTEXT, NUM_STEPS, drain, prompt, report, stage
from floor import median_s
from greedy_answers import answers

from baton.engine import Engine, EngineConfig, Prepared, Request, Role, SamplingParams, load_model_config, plan_layout, prepare
from baton.engine.device.chunk import chunk_of
from baton.engine.device.model import DeviceModel, Rows
from baton.engine.device.products import Mode
from baton.engine.device.prompts import ChunkAttention
from baton.engine.page_table import PageTable
from baton.engine.parallel.model import ShardedModel
from baton.engine.pool import KVPool
from baton.engine.scheduling.sequence import Sequence, Slice
from baton.engine.types import Extent, Token

TARGET = 1.5
#: Of the root mean square of one degree's logits. bfloat16 rounds to 8 bits at other places in another degree.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
         "vocab_size": 4096}  # fmt: skip


def shortened(model: Path, folder: Path, **changes: object) -> Path:
    """The model's config.json with other numbers: dummy weights need no more."""
    config = json.loads((model / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def loaded(folder: Path, device: str, degree: int, **settings: object) -> Prepared:
    return prepare(folder, EngineConfig(**settings), Role.PLAIN, device=device, load_format="dummy", tensor_parallel=degree)


def engine_of(prepared: Prepared) -> Engine:
    return Engine(Role.PLAIN, prepared.model, prepared.config, pool=prepared.device_pool())


# --- correctness -------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def logits_of(model: DeviceModel, degree: int, tokens: list[int]) -> torch.Tensor:
    """Of one fresh prompt, on one rank: [tokens, vocabulary] float32 on the CPU."""
    layout = plan_layout(model.config, EngineConfig(num_pages=64, dtype=str(model.dtype).removeprefix("torch."))).of_rank(degree)
    pool = KVPool(layout, model.dtype, device=model.device)
    pages = PageTable()
    pages.append(Extent(0, layout.pages_for(len(tokens))))
    piece = Slice(Sequence(Request(1, tokens, SamplingParams()), tokens, pages=pages), 0, len(tokens), samples=True)
    rows = Rows(*(torch.tensor(each, device=model.device) for each in (tokens, range(len(tokens)), range(len(tokens)))), sampled=None)
    found = model.forward(rows, pool, ChunkAttention(chunk_of([piece], layout.page_size), False, model.device), Mode.MANY)
    assert found is not None
    return found.float().cpu()


def compare_logits(folder: Path, device: str, degree: int, dtype: str, found: list[dict]) -> None:
    tokens = prompt(random.Random(3), load_model_config(folder).vocab_size, 200)
    alone = loaded(folder, device, 1, dtype=dtype, num_pages=1)
    shared = loaded(folder, device, degree, dtype=dtype, num_pages=1)
    try:
        model = shared.model
        assert isinstance(model, ShardedModel)
        expected = logits_of(alone.model, 1, tokens)
        ranks = model.ranks.run(lambda rank: logits_of(model.shards[rank], degree, tokens))
        same = all(torch.equal(ranks[0], other) for other in ranks[1:])
        error = float((ranks[0] - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        good = same and error <= TOLERANCE[dtype]
        found.append({"name": f"logits, {dtype}", "measured": error, "target": TOLERANCE[dtype], "unit": "relative rms", "met": good})
        print(f"logits of {degree} ranks beside one, {dtype}: relative error {error:.2e}, at most {TOLERANCE[dtype]:.0e}; "
              f"all ranks {'equal' if same else 'UNEQUAL'} bit for bit: {'ok' if good else 'WRONG'}")  # fmt: skip
    finally:
        shared.close()


def compare_answers(folder: Path, device: str, degree: int, found: list[dict]) -> None:
    """Captured steps, batches, chunks: greedy in float32, where a tie within rounding may end the equality of one answer but hardly of several."""
    draw, vocab_size = random.Random(4), load_model_config(folder).vocab_size
    prompts = [prompt(draw, vocab_size, length) for length in (1, 17, 100, 333)]
    given = []
    for each in (1, degree):
        prepared = loaded(folder, device, each, dtype="float32", num_pages=256, max_num_batched_tokens=128, max_running=8, max_model_len=512)
        try:
            given.append(answers(engine_of(prepared), prompts, 32))
        finally:
            prepared.close()
    equal = sum(one == other for one, other in zip(*given, strict=True))
    good = equal >= len(prompts) - 1
    found.append({"name": "greedy answers equal", "measured": equal, "target": len(prompts), "unit": "answers", "met": good})
    print(f"greedy answers of {degree} ranks that are those of one: {equal} of {len(prompts)}: {'ok' if good else 'WRONG'}", flush=True)


def compare_batches(folder: Path, device: str, degree: int, found: list[dict]) -> None:
    """The deterministic mode: an answer alone is that in a batch, bit for bit, whatever the order of a collective's sums."""
    draw, vocab_size = random.Random(5), load_model_config(folder).vocab_size
    prompts = [prompt(draw, vocab_size, length) for length in (40, 5, 64, 130)]
    prepared = loaded(folder, device, degree, dtype="bfloat16", num_pages=256, max_running=8, max_model_len=512, deterministic=True)
    try:
        engine = engine_of(prepared)
        good = answers(engine, prompts, 32)[0] == answers(engine, prompts[:1], 32)[0]
    finally:
        prepared.close()
    found.append({"name": "deterministic", "measured": float(good), "target": 1.0, "unit": "", "met": good})
    print(f"deterministic mode, alone and in a batch: {'equal' if good else 'UNEQUAL'}", flush=True)


# --- speed -------------------------------------------------------------------------------------------------------------------------


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Read and written bytes a second of a large copy."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return 2 * num_bytes / median_s(lambda: target.copy_(source), 10)
    target.copy_(source)
    begin = time.perf_counter()
    for _ in range(5):
        target.copy_(source)
    return 10 * num_bytes / (time.perf_counter() - begin)


def settle(engine_devices: tuple[torch.device, ...]) -> None:
    for device in engine_devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def decode_step(engine: Engine, devices: tuple[torch.device, ...], batch: int, context: int, vocab_size: int) -> float:
    """Seconds of a step, the batch decoding and nothing else."""
    draw = random.Random(batch)
    for room in range(batch):
        engine.add(Request(room + 1, prompt(draw, vocab_size, context - NUM_STEPS // 2), SamplingParams(max_tokens=NUM_STEPS + 16)))
    started: dict[int, int] = {}
    while len(started) < batch or min(started.values()) < 4:
        started |= {event.room: event.index for event in engine.step() if isinstance(event, Token)}
    settle(devices)
    steps, begin = engine.stats().steps, time.perf_counter()
    while engine.stats().steps < steps + NUM_STEPS - 16:
        engine.step()
    took = (time.perf_counter() - begin) / (engine.stats().steps - steps)
    drain(engine)
    return took


def collectives_s(model: ShardedModel, batch: int, rounds: int = 20) -> float:
    """Seconds of one step's collectives by themselves, launched one by one: above what they take inside a captured step."""
    config = model.config
    sums = 2 * config.num_layers + 1

    def work(rank: int) -> float:
        group, device = model.groups[rank], model.devices[rank]
        rows = torch.zeros(batch, config.hidden_size, dtype=model.dtype, device=device)
        words = torch.zeros(batch, config.vocab_size // model.degree, dtype=model.dtype, device=device)
        for turn in range(rounds + 2):
            if turn == 2:
                settle((device,))
                begin = time.perf_counter()
            for _ in range(sums):
                rows = group.sum_(rows)
            group.gather_columns(words)
        settle((device,))
        return (time.perf_counter() - begin) / rounds

    return max(model.ranks.run(work))


def measure(folder: Path, device: str, degree: int, dtype: str, batches: list[int], context: int, copy_bytes: int, found: list[dict]) -> None:
    config = load_model_config(folder)
    itemsize = 2 if dtype == "bfloat16" else 4
    layer = 2 * config.num_heads * config.head_dim + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size
    weights = config.hidden_size * (config.vocab_size + config.num_layers * layer) * itemsize
    alone: dict[int, float] = {}
    for each in (1, degree):
        num_pages = (max(batches) + 1) * (context + 96) // 16
        settings = {"dtype": dtype, "max_running": max(batches), "max_num_batched_tokens": max(context, *batches), "num_pages": num_pages}
        with stage(f"{each} rank(s): weights, kernels compiled, steps captured"):
            prepared = loaded(folder, device, each, max_model_len=context + 96, **settings)
            engine = engine_of(prepared)
        model = prepared.model
        devices = model.devices if isinstance(model, ShardedModel) else (model.device,)
        rate = min(copy_rate(place, copy_bytes) for place in dict.fromkeys(devices))
        print(f"{each} rank(s): copy {rate / 1e12:.3f} TB/s on the slowest device", flush=True)
        for batch in batches:
            step_s = decode_step(engine, devices, batch, context, config.vocab_size)
            floor_s = (weights + batch * context * engine.layout.token_bytes) / each / rate
            report(f"decode step, {each} rank(s), batch {batch}", step_s * 1e3, floor_s * 1e3, TARGET, "ms", step_s <= TARGET * floor_s, found)
            if isinstance(model, ShardedModel):
                print(f"  collectives by themselves {collectives_s(model, batch) * 1e3:.3f} ms; one rank: {alone[batch] / step_s:.2f} x")
            else:
                alone[batch] = step_s
        prepared.close()
        del engine, prepared, model
        if device != "cpu":
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0", help="the first; the others are those after it")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true", help="on a CPU, small")
    given = parser.parse_args()
    found: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        changes = SMALL if given.dry else {"num_hidden_layers": 4}
        device = "cpu" if given.dry else given.device
        short = shortened(given.model, Path(scratch) / "short", **changes)
        with stage("correctness"):
            if not given.dry:  # the CPU's own model keeps its logits to its runner; the default tests compare them
                for dtype in TOLERANCE:
                    compare_logits(short, device, given.degree, dtype, found)
                compare_batches(short, device, given.degree, found)
            compare_answers(short, device, given.degree, found)
        if not all(each["met"] for each in found):
            print("WRONG: nothing is measured")
            return 1
        if given.dry:
            measure(short, device, given.degree, "float32", [1, 4], 128, 1 << 24, found)
        else:
            measure(given.model, device, given.degree, "bfloat16", [int(each) for each in given.batches.split(",")], CONTEXT, 2 << 30, found)
    if given.json:
        name = "cpu, dry" if given.dry else torch.cuda.get_device_name()
        given.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "degree": given.degree, "found": found}, indent=1))
    return 0 if given.dry or all(each["met"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
