"""Llama and its cousins (Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE) as plain functions over packed weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from baton.engine.attention import attend
from baton.engine.batch import ForwardBatch
from baton.engine.given_up import GivenUp
from baton.engine.inventory import inventory
from baton.engine.linear import Linear, Tuning, make_linear
from baton.engine.model_config import ModelConfig
from baton.engine.models.collective import Collective
from baton.engine.models.mlp import Mlp, read_mlp
from baton.engine.models.reading import LayerReader, Projection, own_words
from baton.engine.pool import KVPool
from baton.engine.prompt_scores import Also
from baton.engine.rope import interleave, rotate_, rotations
from baton.engine.shard import ShardedReader, shard_config
from baton.engine.weights import Reader


@dataclass(frozen=True, slots=True)
class Layer:
    """qkv: queries, keys and values of all heads in one product. window: tokens that a query sees, 0: all before it."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    window: int
    post_norm: Tensor
    mlp: Mlp


class LlamaModel:
    """Keeps no state between calls. Queries and keys are rotated in interleaved pairs, so keys in the pool are in that order too.

    group: None, or the tensor-parallel group of which this is one rank; it holds the rank's heads, inner columns and words, its pool
    the rank's KV heads, and every rank gets the same logits. `config` is that of the whole model.
    """

    def __init__(self, config: ModelConfig, reader: Reader, dtype: torch.dtype, tuning: Tuning, group: Collective | None = None) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._group = group
        # All headers before any byte: a folder that lacks one tensor is refused at once.
        reader.check(inventory(config))
        if group is not None:
            reader = ShardedReader(reader, config, group.rank, group.size)
            config = shard_config(config, group.size)
        self._own = config
        self._embedding = reader.read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = [_read_layer(config, reader, index, tuning) for index in range(config.num_layers)]
        self._final_norm = reader.read("model.norm.weight", (config.hidden_size,))
        head = self._embedding
        if not config.tie_embeddings:
            head = reader.read("lm_head.weight", (config.vocab_size, config.hidden_size))
        # Only last positions meet the head, and a few rows at a time of prompts that are scored.
        self._head = make_linear(head, None, Tuning.FEW_ROWS)
        self._eps = torch.tensor(config.rms_norm_eps)
        self._rotations = rotations(config.rope, config.head_dim, config.max_model_len).unsqueeze(1)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        layer_done: Callable[[int], None] | None = None,
        given_up: GivenUp | None = None,
        also: Also | None = None,
    ) -> Tensor | None:
        """Writes the step's keys and values into `pool` and returns float32 logits [len(batch.sample_rows), vocabulary]; None when it was given
        up: then the layers from `given_up.at` on were not computed.

        also: gets what the last layer leaves of every row, and what makes float32 logits of such rows.
        layer_done(l) is called as soon as layer l's keys and values are in the pool, before that layer's attention.
        """
        hidden = self._embed(batch.token_ids)
        turns = self._rotations[batch.positions]
        for index, layer in enumerate(self._layers):
            if given_up is not None and given_up(index):
                return None
            hidden = self._attention(index, layer, hidden, turns, batch, pool, layer_done)
            hidden = self._add(hidden, layer.mlp, self._norm(hidden, layer.post_norm))
        if also is not None:
            also(hidden, self._logits)
        return self._logits(hidden if batch.samples_all else hidden[batch.sample_rows])

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(self._norm(hidden, self._final_norm)).float()
        return logits if self._group is None else self._group.gather_columns(logits)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._group is None:
            return F.embedding(token_ids, self._embedding)
        return self._group.sum_(own_words(token_ids, self._embedding, self._group.rank))

    def _add(self, residual: Tensor, product: Linear | Mlp, rows: Tensor) -> Tensor:
        if self._group is None:
            return product.add_to(residual, rows)
        return residual.add_(self._group.sum_(product(rows)))

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
        config = self._own
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
        return self._add(hidden, layer.out, attend(batch.spans, index, query, keys, values, layer.window))

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        # F.rms_norm is a chain of eight operations on a CPU; this one of four takes half its time, and a sixth at 1,024 rows.
        size = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, size, size, value=1 / rows.shape[-1]).rsqrt_()
        return (rows * scale).to(self.dtype).mul_(weight)


def _read_layer(config: ModelConfig, reader: Reader, index: int, tuning: Tuning) -> Layer:
    head_dim, hidden = config.head_dim, config.hidden_size
    tensors = LayerReader(reader, f"model.layers.{index}.", head_dim)
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    projections = [
        Projection("self_attn.q_proj", q_rows, rotated=True),
        Projection("self_attn.k_proj", kv_rows, rotated=True),
        Projection("self_attn.v_proj", kv_rows),
    ]

    def head_norm(name: str) -> Tensor | None:
        return interleave(tensors.vector(f"self_attn.{name}.weight", head_dim), head_dim) if config.qk_norm else None

    return Layer(
        input_norm=tensors.vector("input_layernorm.weight", hidden),
        qkv=tensors.fused(projections, hidden, has_bias=config.qkv_bias, tuning=tuning),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        out=tensors.linear("self_attn.o_proj", hidden, q_rows, has_bias=config.o_bias, tuning=tuning),
        window=config.windows[index],
        post_norm=tensors.vector("post_attention_layernorm.weight", hidden),
        mlp=read_mlp(config, tensors, index, tuning),
    )
