"""What families differ in (experts, windows, rope) against transformers: logits whole, in chunks and token by token, and greedy texts."""

from __future__ import annotations

import pytest
import torch
import transformers
from engine_reference import answers, assert_all_free, engine, forward, prompts, request, run

from baton.engine import load_model
from baton.engine.types import Extent

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 12}
CASES = {
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3-moe, weights as the router gives them": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3-moe, a dense layer by name": ("qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    "qwen3-moe, every other layer sparse, biases": ("qwen3_moe", {**QWEN3_MOE, "decoder_sparse_step": 2, "attention_bias": True}),
    "qwen3-moe, all experts, window": ("qwen3_moe", {**QWEN3_MOE, "num_experts_per_tok": 6, **SLIDING}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral, one expert a token, window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 20}),
    "mistral, window": ("mistral", {"sliding_window": 16}),
    "mistral, each token sees itself": ("mistral", {"sliding_window": 1}),
    "mistral, window longer than the text": ("mistral", {"sliding_window": 200}),
    "qwen2, window from the second layer on": ("qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen2, window switched off": ("qwen2", {**SLIDING, "use_sliding_window": False}),
    "qwen3, window in the middle": ("qwen3", {**SLIDING, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn, ramp not rounded, own betas": ("qwen3", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0}}),
    "yarn, attention factor given": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "yarn, mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "yarn, no original context": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}}),
    "linear": ("mistral", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}, "sliding_window": 31}),
}
# Largest difference of a logit at any of 100 positions, relative to the spread of the logits: rounding in another order.
TOLERANCE = 3e-5
NUM_TOKENS = 100
CHUNKS = {"whole": [100], "chunked": [37, 1, 1, 30, 31], "token by token": [1] * 100}
# Three extents, none beside another: windows begin and end inside all of them.
SCATTERED = [Extent(40, 7), Extent(20, 3), Extent(60, 15)]


@pytest.fixture(scope="module", params=CASES)
def reference(request, make_model):
    family, config = CASES[request.param]
    return make_model(family, **config)


@pytest.mark.parametrize("extents", [[Extent(3, 25)], SCATTERED], ids=["one extent", "scattered"])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_float32_logits_are_those_of_transformers(reference, chunks, extents):
    tokens = prompts([NUM_TOKENS])[0]
    ends = torch.tensor(CHUNKS[chunks]).cumsum(0) - 1
    expected = reference.logits(tokens)
    ours = forward(reference.ours, tokens, extents, CHUNKS[chunks])
    assert (ours - expected[ends]).abs().max() / expected.std() < TOLERANCE


def test_bfloat16_is_no_further_from_float32_than_transformers(reference):
    """The measure is how far transformers itself is from float32 with these weights, as the median over the positions of many short texts:
    where two experts are about equal, rounding picks another one in other positions here than there, and what follows in that text
    is off by more than rounding."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.bfloat16).eval()
    model = load_model(reference.folder, "bfloat16")
    ours_off, usual = [], []
    for tokens in prompts([40] * 10):
        expected = reference.logits(tokens)
        with torch.inference_mode():
            usual.append((theirs(torch.tensor([tokens])).logits[0].float() - expected).square().mean(dim=1).sqrt())
        ours_off.append((forward(model, tokens, SCATTERED, [1] * 40) - expected).square().mean(dim=1).sqrt())
    assert torch.cat(ours_off).median() < 1.15 * torch.cat(usual).median()


def test_greedy_texts_of_a_batch_are_those_of_transformers(reference):
    asked = dict(enumerate(prompts([5, 23, 60]), start=1))
    # Without a cache: transformers' own keeps one token too many when the window is 1.
    expected = {room: reference.greedy(prompt, 24, use_cache=False) for room, prompt in asked.items()}
    plain = engine(reference.ours, num_pages=100, max_num_batched_tokens=24)
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=24))
    assert answers(run(plain)) == expected
    assert_all_free(plain)


@pytest.mark.parametrize("chunks", [[700], [300, 1, 399], [10, 257, 433]], ids=str)
@pytest.mark.parametrize("window", [7, 100, 300, 600])
def test_a_window_over_several_blocks_of_queries(make_model, window, chunks):
    reference = make_model("mistral", sliding_window=window, max_position_embeddings=1024, num_hidden_layers=2)
    tokens = prompts([700])[0]
    ends = torch.tensor(chunks).cumsum(0) - 1
    expected = reference.logits(tokens)
    for extents in ([Extent(0, 44)], [Extent(50, 12), Extent(10, 21), Extent(80, 11)]):
        # Every row's logits, not only the last of a chunk: the rows before reach them through the second layer's keys.
        ours = forward(reference.ours, tokens, extents, chunks, page_size=16)
        assert (ours - expected[ends]).abs().max() / expected.std() < TOLERANCE


def test_a_forgotten_window_or_scaling_would_be_seen(make_model):
    """The cases above can fail: without the window, or with another rope, transformers' own logits are far away."""
    tokens = prompts([NUM_TOKENS])[0]
    for family, config, without in (
        ("mistral", {"sliding_window": 16}, {"sliding_window": None}),
        ("llama", {"rope_parameters": YARN}, {}),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.0}}, {"rope_parameters": YARN}),
        ("qwen3_moe", QWEN3_MOE, {**QWEN3_MOE, "norm_topk_prob": False}),
    ):
        expected = make_model(family, **config).logits(tokens)
        other = make_model(family, **without).logits(tokens)
        assert (other - expected)[50:].abs().max() / expected.std() > 1000 * TOLERANCE
