"""config.json of every family: what published folders say, what silence means, what is refused; and the tensors that follow from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from engine_reference import FAMILIES, SHAPE
from safetensors import safe_open

from baton.engine import ModelConfigError, load_model_config
from baton.engine.inventory import inventory
from baton.engine.model_config import MoeConfig, parse_model_config
from baton.engine.rope import inverse_frequencies
from baton.engine.rope_config import RopeConfig

FILE = Path("somewhere/config.json")
# The fields that matter here, as the publishers' config.json have them.
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MIXTRAL_8X7B = {
    **MISTRAL_7B_V01,
    "architectures": ["MixtralForCausalLM"],
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def parse(raw, **changes):
    return parse_model_config({**raw, **changes}, FILE)


def test_mistral_has_its_window_in_every_layer():
    assert parse(MISTRAL_7B_V01).windows == (4096,) * 32
    assert parse(MISTRAL_7B_V01, sliding_window=None).windows == (0,) * 32
    silent = {name: value for name, value in MISTRAL_7B_V01.items() if name != "sliding_window"}
    assert parse(silent).windows == (4096,) * 32


def test_a_window_that_the_context_never_fills_is_none():
    assert parse(MISTRAL_7B_V01, sliding_window=32768).windows == (0,) * 32
    assert parse(MISTRAL_7B_V01, sliding_window=32767).windows == (32767,) * 32


def test_qwen2_switches_its_window():
    assert parse(QWEN25_7B).windows == (0,) * 28
    assert parse(QWEN25_7B, use_sliding_window=True, sliding_window=4096, max_window_layers=21).windows == (0,) * 21 + (4096,) * 7
    assert parse(QWEN25_7B, use_sliding_window=True, sliding_window=4096, max_window_layers=0).windows == (4096,) * 28
    types = ["full_attention", "sliding_attention"] * 14
    assert parse(QWEN25_7B, use_sliding_window=True, sliding_window=4096, layer_types=types).windows == (0, 4096) * 14


def test_mixtures_of_experts():
    mixtral = parse(MIXTRAL_8X7B)
    assert mixtral.moe == MoeConfig(8, 2, 14336, renormalize=True, sparse=(True,) * 32, names=mixtral.moe.names)
    assert mixtral.moe.names.expert(3, mixtral.moe.names.down) == "block_sparse_moe.experts.3.w2"
    qwen = parse(QWEN3_30B_A3B)
    assert qwen.moe == MoeConfig(128, 8, 768, renormalize=True, sparse=(True,) * 48, names=qwen.moe.names)
    assert (qwen.qk_norm, qwen.qkv_bias, qwen.head_dim) == (True, False, 128)
    assert parse(QWEN3_30B_A3B, decoder_sparse_step=2, mlp_only_layers=[1, 3]).moe.sparse == (False,) * 4 + (False, True) * 22
    # What transformers 5 saves.
    resaved = {**{name: value for name, value in QWEN3_30B_A3B.items() if name != "num_experts"}, "num_local_experts": 128}
    assert parse(resaved) == qwen
    assert parse(QWEN25_7B).moe is None
    assert not parse(QWEN25_7B).is_sparse(0)


def test_yarn_stretches_the_context():
    qwen = parse(QWEN25_7B, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})
    assert qwen.max_model_len == 131072
    assert (qwen.rope.kind, qwen.rope.factor, qwen.rope.original_max_position) == ("yarn", 4.0, 32768)
    assert qwen.rope.attention_scaling == pytest.approx(1.1386294)
    # A window of the stretched context counts.
    windowed = parse(QWEN25_7B, use_sliding_window=True, max_window_layers=1, sliding_window=40000, rope_scaling=None)
    assert windowed.windows == (0,) * 28
    both = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, "use_sliding_window": True}
    assert parse(QWEN25_7B, **both, max_window_layers=27, sliding_window=40000).windows == (0,) * 27 + (40000,)
    # Without the original context, max_position_embeddings is both.
    alone = parse(QWEN25_7B, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert (alone.max_model_len, alone.rope.original_max_position) == (32768, 32768)


@pytest.mark.parametrize("family", FAMILIES)
def test_silence_means_what_it_means_to_transformers(family):
    """Only what every config.json has to say is said; the rest is compared with the defaults of transformers' class."""
    config_class, model_class = FAMILIES[family]
    said = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    said |= {"max_position_embeddings": 8192} | ({"num_experts": 16, "moe_intermediate_size": 16} if family == "qwen3_moe" else {})
    theirs = config_class(**said)
    ours = parse({"architectures": [model_class.__name__], **said})
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    window = getattr(theirs, "sliding_window", None) or 0
    assert ours.windows == (window, window)
    if ours.moe is not None:
        assert ours.moe.num_experts == theirs.num_local_experts
        assert ours.moe.experts_per_token == theirs.num_experts_per_tok
        assert ours.moe.renormalize == getattr(theirs, "norm_topk_prob", True)


@pytest.mark.parametrize(
    ("base", "changes", "field", "words"),
    [
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts", "at least 1"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok", r"above num_local_experts \(8\)"),
        (QWEN3_30B_A3B, {"num_local_experts": 64}, "num_local_experts", r"num_experts \(128\)"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "mlp_only_layers", "from 0 to 47"),
        (QWEN3_30B_A3B, {"mlp_only_layers": 3}, "mlp_only_layers", "list of whole numbers"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, "decoder_sparse_step", "at least 1"),
        (QWEN3_30B_A3B, {"norm_topk_prob": 1}, "norm_topk_prob", "true or false"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": None}, "moe_intermediate_size", "at least 1"),
        (MISTRAL_7B_V01, {"sliding_window": 0}, "sliding_window", "at least 1"),
        (MISTRAL_7B_V01, {"sliding_window": "4096"}, "sliding_window", "whole number"),
        (QWEN25_7B, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers", "at least 0"),
        (QWEN25_7B, {"layer_types": ["full_attention"]}, "layer_types", r"list of 28 \(num_hidden_layers\)"),
        (QWEN25_7B, {"layer_types": ["chunked_attention"] * 28}, "layer_types", "full_attention, sliding_attention"),
        (QWEN25_7B, {"layer_types": ["sliding_attention"] * 28}, "layer_types", "no sliding_window"),
        (
            QWEN25_7B,
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            r"rope_scaling\.rope_type",
            "must be one of default, linear, llama3, yarn",
        ),
        (QWEN25_7B, {"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling\.rope_type", "must be one of default, linear, llama3, yarn"),
        (QWEN25_7B, {"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, r"rope_scaling\.factor", "above 0"),
        (
            QWEN25_7B,
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}},
            r"rope_parameters\.beta_fast",
            "beta_slow",
        ),
        (QWEN25_7B, {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary_factor", "1.0"),
    ],
)
def test_errors_name_file_field_value_and_limit(base, changes, field, words):
    with pytest.raises(ModelConfigError, match=rf"^somewhere/config\.json: {field} = .*{words}"):
        parse(base, **changes)


@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
@pytest.mark.parametrize("extra", [{}, {"truncate": False}, {"beta_fast": 16, "beta_slow": 4}, {"original_max_position_embeddings": 64}], ids=str)
def test_yarn_frequencies_are_those_of_transformers_up_to_rounding(factor, extra):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": factor, "original_max_position_embeddings": 4096, **extra}
    theirs = transformers.Qwen3Config(**{**SHAPE, "head_dim": 128, "max_position_embeddings": 4096}, rope_parameters=dict(rope))
    expected, scaling = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = parse(QWEN25_7B, rope_parameters=rope).rope
    assert (inverse_frequencies(ours, 128) / expected - 1).abs().max() < 5e-7
    assert ours.attention_scaling == pytest.approx(scaling)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}),
        ("mixtral", {"num_local_experts": 3}),
    ],
)
def test_the_inventory_is_what_transformers_saves(make_model, family, config):
    """Names and shapes, nothing missing and nothing over."""
    folder = make_model(family, **config).folder
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert {spec.name: spec.shape for spec in inventory(load_model_config(folder))} == saved
    assert json.loads((folder / "config.json").read_text())["architectures"] == [FAMILIES[family][1].__name__]
