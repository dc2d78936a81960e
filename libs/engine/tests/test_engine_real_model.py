"""SmolLM2 itself, when its folder is there: greedy text of a mixed batch is transformers', in chunks and with scattered pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers
from engine_reference import answers, assert_all_free, run

from baton.engine import Engine, EngineConfig, Request, Role, SamplingParams, load_model

CACHE = Path(os.environ.get("BATON_CACHE_DIR", Path.home() / ".cache" / "baton"))
FOLDER = Path(os.environ.get("BATON_TEST_MODEL", CACHE / "models" / "smollm2"))
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a runner who carried a baton. " * 20,
    "1, 2, 3, 4,",
]
NUM_TOKENS = 24

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not FOLDER.exists(), reason=f"no model at {FOLDER}: baton model fetch smollm2")]


@pytest.fixture(scope="module")
def expected():
    """Prompt ids and greedy continuations by room."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    found = {}
    for room, text in enumerate(TEXTS, start=1):
        ids = torch.tensor([tokenizer(text).input_ids])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        found[room] = (ids[0].tolist(), out[0, ids.shape[1] :].tolist())
    assert "Paris" in tokenizer.decode(found[1][1])
    return found


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 100, "growth_tokens": 0, "num_pages": 21}], ids=["roomy", "chunked and tight"])
def test_smollm2_greedy_is_transformers(expected, settings):
    engine = Engine(Role.PLAIN, load_model(FOLDER), EngineConfig(**{"num_pages": 128, "max_running": 8, **settings}))
    for room, (prompt, _) in expected.items():
        engine.add(Request(room, prompt, SamplingParams(max_tokens=NUM_TOKENS)))
    assert answers(run(engine)) == {room: tokens for room, (_, tokens) in expected.items()}
    assert_all_free(engine)
    if settings:
        assert engine.stats().extra["retractions"] > 0


def test_smollm2_in_bfloat16_starts_as_in_float32(expected):
    engine = Engine(Role.PLAIN, load_model(FOLDER, "bfloat16"), EngineConfig(num_pages=64, dtype="bfloat16"))
    prompt, tokens = expected[1]
    engine.add(Request(1, prompt, SamplingParams(max_tokens=2)))
    assert answers(run(engine))[1] == tokens[:2]


def test_smollm2_in_three_ranks(expected):
    """Its three KV heads allow no other degree."""
    model = load_model(FOLDER, tensor_parallel=3)
    try:
        engine = Engine(Role.PLAIN, model, EngineConfig(num_pages=128, max_running=8, max_num_batched_tokens=100))
        for room, (prompt, _) in expected.items():
            engine.add(Request(room, prompt, SamplingParams(max_tokens=NUM_TOKENS)))
        assert answers(run(engine)) == {room: tokens for room, (_, tokens) in expected.items()}
        assert_all_free(engine)
    finally:
        model.close()
