"""The same models as `models.llama`, over tensors of a device and the kernels of `baton.kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from baton.engine.device.experts import DeviceMlp, GatedMlp, read_experts
from baton.engine.device.products import Mode, Product, Stream
from baton.engine.given_up import GivenUp
from baton.engine.inventory import inventory
from baton.engine.model_config import ModelConfig
from baton.engine.models.collective import Collective
from baton.engine.models.reading import own_words
from baton.engine.pool import KVPool
from baton.engine.prompt_scores import Also
from baton.engine.rope import interleave, rotations
from baton.engine.shard import ShardedReader, shard_config
from baton.engine.weights import Reader
from baton.kernels import rope_and_write


class Attention(Protocol):
    """Attention of a step's rows over the pages of their sequences."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        """query [n, heads, head dim], keys and values [n, kv heads, head dim] of the step's own rows, which are already in `pages` (the layer's
        keys and values) -> [n, heads, head dim]."""

    def of_sampled(self, query: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        """The same for those rows only whose logits are wanted: query [samples, heads, head dim]."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows. token_ids, positions, slots: [n] int64; a negative slot is not written. sampled: [samples] int64, the rows whose logits
    are wanted; None: all of them, in order."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    input_norm: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Product
    window: int
    post_norm: Tensor
    mlp: DeviceMlp


class DeviceModel:
    """Keeps no state between calls. Queries and keys are rotated in interleaved pairs, as on the CPU: the two may hand pages to each other.

    group: None, or the tensor-parallel group of which this is one rank, as of `LlamaModel`. `config` is that of the whole model.
    """

    def __init__(self, config: ModelConfig, reader: Reader, dtype: torch.dtype, device: torch.device, group: Collective | None = None) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.group = group
        reader.check(inventory(config))
        if group is not None:
            reader = ShardedReader(reader, config, group.rank, group.size)
            config = shard_config(config, group.size)
        self._own = config
        embedding = (config.vocab_size, config.hidden_size)
        self._embedding = reader.read("model.embed_tokens.weight", embedding, device)
        self._layers = [_read_layer(config, reader, index, dtype, device) for index in range(config.num_layers)]
        self._final_norm = reader.read("model.norm.weight", (config.hidden_size,), device)
        self._head = Product(self._embedding if config.tie_embeddings else reader.read("lm_head.weight", embedding, device), None)
        turns = torch.view_as_real(rotations(config.rope, config.head_dim, config.max_model_len))
        self._turns = turns.flatten(1).to(device)

    def forward(
        self,
        rows: Rows,
        pool: KVPool,
        attention: Attention,
        mode: Mode,
        layer_done: Callable[[int], None] | None = None,
        given_up: GivenUp | None = None,
        out: Tensor | None = None,
        also: Also | None = None,
    ) -> Tensor | None:
        """Writes the rows' keys and values into `pool` and returns logits [samples, vocabulary] in the model's dtype; None without samples, and
        when it was given up: then the layers from `given_up.at` on were not launched. Nothing that is captured may be given up.
        out: the logits go there, and it is returned. also: gets what the last layer leaves of every row, normed, and what makes logits of such rows.

        Only launches: nothing here waits for the device. layer_done(l) is called when the launch that puts layer l's keys and values into
        the pool has been made. In the last layer nothing but those, and what the sampled rows need, is computed.
        """
        config, (q, kv) = self._own, self._widths()
        stream = Stream(self._embed(rows.token_ids), config.rms_norm_eps, self.group)
        for index, layer in enumerate(self._layers):
            if given_up is not None and given_up(index):
                return None
            qkv = layer.qkv(stream.normed(layer.input_norm), mode)
            pages = pool.pages(index)
            rope_and_write(
                qkv, rows.positions, rows.slots, self._turns, *pages, config.num_heads, config.num_kv_heads,
                layer.q_norm, layer.k_norm, config.rms_norm_eps,
            )  # fmt: skip
            if layer_done is not None:
                layer_done(index)
            query, keys, values = (part.view(len(qkv), -1, config.head_dim) for part in (qkv[:, :q], qkv[:, q : q + kv], qkv[:, q + kv :]))
            if index < config.num_layers - 1 or rows.sampled is None or also is not None:
                attended = attention(query, keys, values, pages, layer.window)
            elif len(rows.sampled):
                stream = stream.select(rows.sampled)
                attended = attention.of_sampled(query[rows.sampled], pages, layer.window)
            else:
                return None
            stream.add(layer.out, attended.flatten(1), mode)
            layer.mlp.add_to(stream, layer.post_norm, mode)
        sampled = stream.normed(self._final_norm)
        if also is not None:
            also(sampled, lambda some: self._logits(some, mode))
            if rows.sampled is not None:
                sampled = sampled[rows.sampled]
            if not len(sampled):
                return None
        if out is None or self.group is not None:
            logits = self._logits(sampled, mode)
            return logits if out is None else out.copy_(logits)
        self._head.into(out, sampled, mode)
        return out

    def _logits(self, normed: Tensor, mode: Mode) -> Tensor:
        logits = self._head(normed, mode)
        return logits if self.group is None else self.group.gather_columns(logits)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.group is None:
            return F.embedding(token_ids, self._embedding)
        return self.group.sum_(own_words(token_ids, self._embedding, self.group.rank))

    def _widths(self) -> tuple[int, int]:
        return self._own.num_heads * self._own.head_dim, self._own.num_kv_heads * self._own.head_dim


def _read_layer(config: ModelConfig, reader: Reader, index: int, dtype: torch.dtype, device: torch.device) -> DeviceLayer:
    prefix = f"model.layers.{index}."
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def vector(name: str, size: int) -> Tensor:
        return reader.read(f"{prefix}{name}", (size,), device)

    def ordered(tensor: Tensor, rotated: bool) -> Tensor:
        return interleave(tensor, head_dim) if rotated else tensor

    def fused(parts: list[tuple[str, int, bool]], has_bias: bool) -> Product:
        weight = torch.cat([ordered(reader.read(f"{prefix}{name}.weight", (size, hidden), device), turns) for name, size, turns in parts])
        bias = torch.cat([ordered(vector(f"{name}.bias", size), turns) for name, size, turns in parts]) if has_bias else None
        return Product(weight, bias)

    def product(name: str, size: int, columns: int, has_bias: bool) -> Product:
        return Product(reader.read(f"{prefix}{name}.weight", (size, columns), device), vector(f"{name}.bias", size) if has_bias else None)

    def head_norm(name: str) -> Tensor | None:
        return interleave(vector(f"self_attn.{name}.weight", head_dim), head_dim) if config.qk_norm else None

    def mlp() -> DeviceMlp:
        if config.moe is not None and config.is_sparse(index):
            return read_experts(config, config.moe, reader, prefix, device, dtype)
        inner = config.intermediate_size
        gate_up = fused([("mlp.gate_proj", inner, False), ("mlp.up_proj", inner, False)], config.mlp_bias)
        return GatedMlp(gate_up, product("mlp.down_proj", hidden, inner, config.mlp_bias))

    return DeviceLayer(
        input_norm=vector("input_layernorm.weight", hidden),
        qkv=fused([("self_attn.q_proj", q, True), ("self_attn.k_proj", kv, True), ("self_attn.v_proj", kv, False)], config.qkv_bias),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        out=product("self_attn.o_proj", hidden, q, config.o_bias),
        window=config.windows[index],
        post_norm=vector("post_attention_layernorm.weight", hidden),
        mlp=mlp(),
    )
