"""Llama and its cousins (Mistral, Qwen2, Qwen3) as plain functions over packed weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from baton.engine.attention import attend
from baton.engine.batch import ForwardBatch
from baton.engine.linear import Linear, Tuning, make_linear
from baton.engine.model_config import ModelConfig
from baton.engine.pool import KVPool
from baton.engine.rope import interleave, rotate_, rotations
from baton.engine.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Layer:
    """qkv: queries, keys and values of all heads in one product. gate_up: gate, then up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Keeps no state between calls. Queries and keys are rotated in interleaved pairs, so keys in the pool are in that order too."""

    def __init__(self, config: ModelConfig, reader: WeightReader, dtype: torch.dtype, tuning: Tuning) -> None:
        self.config = config
        self.dtype = dtype
        self._embedding = reader.read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = [_read_layer(config, reader, index, tuning) for index in range(config.num_layers)]
        self._final_norm = reader.read("model.norm.weight", (config.hidden_size,))
        head = self._embedding
        if not config.tie_embeddings:
            head = reader.read("lm_head.weight", (config.vocab_size, config.hidden_size))
        # Only last positions meet the head: few rows in every role.
        self._head = make_linear(head, None, Tuning.FEW_ROWS)
        self._eps = torch.tensor(config.rms_norm_eps)
        self._rotations = rotations(config.rope, config.head_dim, config.max_model_len).unsqueeze(1)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool, layer_done: Callable[[int], None] | None = None) -> Tensor:
        """Writes the step's keys and values into `pool` and returns float32 logits [len(batch.sample_rows), vocabulary].

        layer_done(l) is called as soon as layer l's keys and values are in the pool, before that layer's attention.
        """
        hidden = F.embedding(batch.token_ids, self._embedding)
        turns = self._rotations[batch.positions]
        for index, layer in enumerate(self._layers):
            hidden = self._attention(index, layer, hidden, turns, batch, pool, layer_done)
            hidden = self._mlp(layer, hidden)
        sampled = hidden if batch.samples_all else hidden[batch.sample_rows]
        return self._head(self._norm(sampled, self._final_norm)).float()

    def _attention(
        self,
        index: int,
        layer: Layer,
        hidden: Tensor,
        turns: Tensor,
        batch: ForwardBatch,
        pool: KVPool,
        layer_done: Callable[[int], None] | None,
    ) -> Tensor:
        config = self.config
        rows = hidden.shape[0]
        qkv = layer.qkv(self._norm(hidden, layer.input_norm)).view(rows, -1, config.head_dim)
        query, keys_values = qkv[:, : config.num_heads], qkv[:, config.num_heads :].view(rows, 2, config.num_kv_heads, config.head_dim)
        keys, values = keys_values.unbind(1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query.copy_(self._norm(query, layer.q_norm))
            keys.copy_(self._norm(keys, layer.k_norm))
        rotate_(qkv[:, : config.num_heads + config.num_kv_heads], turns)
        pool.write(index, batch.writes, keys_values)
        if layer_done is not None:
            layer_done(index)
        return layer.out.add_to(hidden, attend(batch.spans, index, query, keys, values, config.windows[index]))

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.post_norm)).chunk(2, dim=-1)
        return layer.down.add_to(hidden, F.silu(gate).mul_(up))

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        # F.rms_norm is a chain of eight operations on a CPU; this one of four takes half its time, and a sixth at 1,024 rows.
        size = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, size, size, value=1 / rows.shape[-1]).rsqrt_()
        return (rows * scale).to(self.dtype).mul_(weight)


def _read_layer(config: ModelConfig, reader: WeightReader, index: int, tuning: Tuning) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def norm(name: str, size: int) -> Tensor:
        return reader.read(f"{prefix}{name}.weight", (size,))

    def bias(name: str, size: int, present: bool) -> Tensor | None:
        return reader.read(f"{prefix}{name}.bias", (size,)) if present else None

    def projection(name: str, rows: int, columns: int) -> Tensor:
        return reader.read(f"{prefix}{name}.weight", (rows, columns))

    def fused(parts: list[tuple[str, int, bool]], has_bias: bool) -> Linear:
        """Several projections of the same input as one; the flag says whose heads are rotated."""
        weights, biases = [], []
        for name, rows, rotated in parts:
            weight = projection(name, rows, hidden)
            offset = bias(name, rows, has_bias)
            weights.append(interleave(weight, head_dim) if rotated else weight)
            if offset is not None:
                biases.append(interleave(offset, head_dim) if rotated else offset)
        return make_linear(torch.cat(weights), torch.cat(biases) if biases else None, tuning)

    attention = [("self_attn.q_proj", q_rows, True), ("self_attn.k_proj", kv_rows, True), ("self_attn.v_proj", kv_rows, False)]
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=fused(attention, config.qkv_bias),
        q_norm=interleave(norm("self_attn.q_norm", head_dim), head_dim) if config.qk_norm else None,
        k_norm=interleave(norm("self_attn.k_norm", head_dim), head_dim) if config.qk_norm else None,
        out=make_linear(projection("self_attn.o_proj", hidden, q_rows), bias("self_attn.o_proj", hidden, config.o_bias), tuning),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=fused([("mlp.gate_proj", inner, False), ("mlp.up_proj", inner, False)], config.mlp_bias),
        down=make_linear(projection("mlp.down_proj", hidden, inner), bias("mlp.down_proj", hidden, config.mlp_bias), tuning),
    )
