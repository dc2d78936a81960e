"""Every tensor that a model reads from its folder: name, shape, and how tensor parallelism divides it. No torch."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton.engine.model_config import ModelConfig


class Split(enum.Enum):
    """How the ranks of a tensor-parallel group share a tensor.

    NONE: every rank has all of it. ROWS, COLUMNS: rank r has the r-th of equal parts along the first or last axis.
    FIRST: rank 0 has it and the others zeros, because it is added to a sum over ranks.
    """

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"
    FIRST = "first"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the files name it and Hugging Face shapes it: [out, in] for projections."""

    name: str
    shape: tuple[int, ...]
    split: Split = Split.NONE

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def inventory(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors, in the order of the forward pass."""
    embedding = (config.vocab_size, config.hidden_size)
    yield TensorSpec("model.embed_tokens.weight", embedding, Split.ROWS)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield TensorSpec(f"{prefix}input_layernorm.weight", (config.hidden_size,))
        yield from _attention(config, f"{prefix}self_attn.")
        yield TensorSpec(f"{prefix}post_attention_layernorm.weight", (config.hidden_size,))
        yield from _experts(config, prefix) if config.is_sparse(layer) else _mlp(config, f"{prefix}mlp.")
    yield TensorSpec("model.norm.weight", (config.hidden_size,))
    if not config.tie_embeddings:
        yield TensorSpec("lm_head.weight", embedding, Split.ROWS)


def _attention(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    rows = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
    for name, num_heads in rows.items():
        yield TensorSpec(f"{prefix}{name}.weight", (num_heads * config.head_dim, config.hidden_size), Split.ROWS)
        if config.qkv_bias:
            yield TensorSpec(f"{prefix}{name}.bias", (num_heads * config.head_dim,), Split.ROWS)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield TensorSpec(f"{prefix}{name}.weight", (config.head_dim,))
    yield TensorSpec(f"{prefix}o_proj.weight", (config.hidden_size, config.num_heads * config.head_dim), Split.COLUMNS)
    if config.o_bias:
        yield TensorSpec(f"{prefix}o_proj.bias", (config.hidden_size,), Split.FIRST)


def _mlp(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    for name, shape, split, bias_split in (
        ("gate_proj", (inner, hidden), Split.ROWS, Split.ROWS),
        ("up_proj", (inner, hidden), Split.ROWS, Split.ROWS),
        ("down_proj", (hidden, inner), Split.COLUMNS, Split.FIRST),
    ):
        yield TensorSpec(f"{prefix}{name}.weight", shape, split)
        if config.mlp_bias:
            yield TensorSpec(f"{prefix}{name}.bias", shape[:1], bias_split)


def _experts(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    moe = config.moe
    assert moe is not None
    hidden, inner, names = config.hidden_size, moe.intermediate_size, moe.names
    yield TensorSpec(f"{prefix}{names.router}.weight", (moe.num_experts, hidden))
    for expert in range(moe.num_experts):
        yield TensorSpec(f"{prefix}{names.expert(expert, names.gate)}.weight", (inner, hidden), Split.ROWS)
        yield TensorSpec(f"{prefix}{names.expert(expert, names.up)}.weight", (inner, hidden), Split.ROWS)
        yield TensorSpec(f"{prefix}{names.expert(expert, names.down)}.weight", (hidden, inner), Split.COLUMNS)
