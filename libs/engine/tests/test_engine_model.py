"""Logits of every family against transformers, in both dtypes, whole and in chunks."""

from __future__ import annotations

import pytest
import torch
import transformers
from engine_reference import engine, forward, prompts, rms

from baton.engine import load_model
from baton.engine.batch import build_batch
from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool
from baton.engine.scheduling.sequence import Sequence, Slice
from baton.engine.types import Extent, Request, SamplingParams

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama, own head, biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama, one KV head a head": ("llama", {"num_key_value_heads": 6}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
}
# Largest difference of a logit relative to the spread of the logits: float32 sums in another order. 1.02e-5 was seen on a processor with AVX-512,
# less on others; a wrong page is thousands of times that.
TOLERANCE = 2e-5


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(make_model, case):
    family, config = CASES[case]
    reference = make_model(family, **config)
    tokens = prompts([100])[0]
    expected = reference.logits(tokens)
    chunks = [37, 1, 1, 30, 31]
    ends = [sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
    ours = forward(reference.ours, tokens, [Extent(3, 25)], chunks)
    assert (ours - expected[ends]).abs().max() / expected.std() < TOLERANCE
    # bfloat16 has 8 bits: the measure is how far transformers itself is from float32 with these weights.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        usual = rms(theirs(torch.tensor([tokens])).logits[0].float()[ends] - expected[ends])
    ours = forward(load_model(reference.folder, "bfloat16"), tokens, [Extent(3, 25)], chunks)
    assert rms(ours - expected[ends]) < 1.25 * usual


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_extents", [1, 2, 7])
def test_scattered_pages_and_chunks_change_nothing(tiny, page_size, num_extents):
    tokens = prompts([112])[0]
    num_pages = -(-112 // page_size)
    share = -(-num_pages // num_extents)
    # Downwards through the pool, with gaps: no two extents touch.
    extents = [Extent(126 - (index + 1) * (share + 1), min(share, num_pages - index * share)) for index in range(num_extents)]
    extents = [extent for extent in extents if extent.count > 0]
    expected = tiny.logits(tokens)
    for chunks in ([112], [1] * 112, [16] * 7, [3, 50, 1, 57, 1]):
        ends = [sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
        ours = forward(tiny.ours, tokens, extents, chunks, page_size)
        assert (ours - expected[ends]).abs().max() / expected.std() < TOLERANCE


def test_the_two_weight_layouts_agree(tiny):
    from baton.engine import Role

    tokens = prompts([60])[0]
    single = load_model(tiny.folder, role=Role.DECODE)
    one = forward(single, tokens, [Extent(0, 15)], [59, 1])
    two = forward(tiny.ours, tokens, [Extent(0, 15)], [59, 1])
    torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_layers_are_reported_in_order_when_their_pages_are_written(tiny):
    tokens = prompts([10])[0]
    layout = engine(tiny.ours).layout
    pool = KVPool(layout, torch.float32)
    pool.planes.fill_(float("nan"))
    table = PageTable()
    table.append(Extent(2, 3))
    sequence = Sequence(Request(1, tokens, SamplingParams()), tokens, pages=table)
    seen = []

    def layer_done(layer: int) -> None:
        written = pool.layers[layer][:, 8:18].isfinite().all()
        untouched = all(plane.isnan().all() for plane in pool.layers[layer + 1 :])
        seen.append((layer, bool(written), untouched))

    tiny.ours.forward(build_batch([Slice(sequence, 0, 10, samples=True)], pool), pool, layer_done)
    assert seen == [(layer, True, True) for layer in range(3)]
