"""Models and settings that no GPU kernel takes are told by name, before a weight is read. No GPU is needed to say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine import EngineConfig, InvalidSettingError, ModelConfigError, Role, preparation, prepare
from baton.engine.device.limits import require_runnable
from baton.engine.model_config import parse_model_config

FILE = Path("somewhere/config.json")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 132,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FITS = EngineConfig(num_pages=8)


@pytest.mark.parametrize("raw", [LLAMA, MOE], ids=["llama", "moe"])
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_what_kernels_take_is_let_through(raw, page_size):
    for degree in (1, 2):
        require_runnable(parse_model_config(raw, FILE), replace(FITS, page_size=page_size), degree, FILE)


@pytest.mark.parametrize("page_size", [7, 48, 512])
def test_a_page_that_no_kernel_reads(page_size):
    with pytest.raises(InvalidSettingError, match=f"^page_size = {page_size}: on a GPU it must be a power of two, at most 256"):
        require_runnable(parse_model_config(LLAMA, FILE), replace(FITS, page_size=page_size), 1, FILE)


@pytest.mark.parametrize(
    ("raw", "changes", "degree", "words"),
    [
        (LLAMA, {"head_dim": 288}, 1, "head_dim = 288: must be at most 256"),
        (LLAMA, {"hidden_size": 32784}, 1, "hidden_size = 32784: must be at most 32768"),
        (LLAMA, {"hidden_size": 72}, 1, "hidden_size = 72: must be a multiple of 16"),
        (LLAMA, {"head_dim": 10, "num_attention_heads": 6}, 1, r"num_attention_heads \* head_dim = 60: must be a multiple of 16"),
        (LLAMA, {"intermediate_size": 100}, 1, "intermediate_size = 100: must be a multiple of 16"),
        (LLAMA, {"intermediate_size": 80}, 2, "intermediate_size = 80, 40 on each of 2 ranks: must be a multiple of 16"),
        (MOE, {"moe_intermediate_size": 24}, 1, "the experts' intermediate_size = 24: must be a multiple of 16"),
        (MOE, {"num_experts": 1040}, 1, "num_experts = 1040: must be at most 1024"),
    ],
)
def test_a_size_that_no_kernel_takes(raw, changes, degree, words):
    with pytest.raises(ModelConfigError, match=f"^somewhere/config.json: {words} on a GPU$"):
        require_runnable(parse_model_config({**raw, **changes}, FILE), FITS, degree, FILE)


def test_it_is_told_before_weights_are_looked_for(tmp_path, monkeypatch):
    """The folder has none, and there may be no GPU."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(preparation, "torch_device", torch.device)
    with pytest.raises(InvalidSettingError, match="page_size = 512"):
        prepare(tmp_path, EngineConfig(num_pages=8, page_size=512), Role.PLAIN, device="cuda:0")
