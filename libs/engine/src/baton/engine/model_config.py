"""What config.json of a Hugging Face folder says about a model, checked field by field."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.engine.config_json import CONFIG_FILE, Fields, read_config_json
from baton.engine.rope_config import RopeConfig, parse_rope

__all__ = ["CONFIG_FILE", "FAMILIES", "ModelConfig", "MoeConfig", "RopeConfig", "load_model_config", "parse_model_config"]

#: Far above any model. What is reckoned for each tensor of a model (memory, names) must end in seconds, also for nonsense.
MOST_LAYERS = 4096
MOST_EXPERTS = 65536
MOST_EXPERTS_OF_ALL_LAYERS = 1 << 18


class WindowRule(enum.Enum):
    """Which layers of a family have a sliding window. NEVER: none, and config.json must not ask for one. ALWAYS: all, unless
    sliding_window is null or layer_types says otherwise. SWITCHED: use_sliding_window turns it on; for layers from max_window_layers on
    (SWITCHED_TAIL) or for all (SWITCHED_ALL)."""

    NEVER = enum.auto()
    ALWAYS = enum.auto()
    SWITCHED_TAIL = enum.auto()
    SWITCHED_ALL = enum.auto()


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's files name the tensors of a sparse layer, below `model.layers.N.`: one tensor for each expert and matrix."""

    block: str
    gate: str
    up: str
    down: str

    @property
    def router(self) -> str:
        return f"{self.block}.gate"

    def expert(self, index: int, matrix: str) -> str:
        return f"{self.block}.experts.{index}.{matrix}"


@dataclass(frozen=True, slots=True)
class Family:
    """Where one architecture differs from Llama. Defaults are those that transformers puts in when config.json is silent.

    qkv_bias None: config.json's attention_bias decides, for qkv and o alike. mlp_bias: config.json's mlp_bias counts.
    experts: set for a mixture of experts.
    """

    qkv_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: WindowRule = WindowRule.NEVER
    default_window: int | None = None
    default_head_dim: int | None = None
    default_theta: float = 10000.0
    default_norm_eps: float = 1e-6
    experts: ExpertNames | None = None


_QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False, windows=WindowRule.ALWAYS, default_window=4096),
    "MixtralForCausalLM": Family(qkv_bias=False, windows=WindowRule.ALWAYS, default_theta=1e6, default_norm_eps=1e-5, experts=_MIXTRAL_EXPERTS),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=WindowRule.SWITCHED_TAIL, default_window=4096),
    "Qwen3ForCausalLM": Family(qk_norm=True, windows=WindowRule.SWITCHED_TAIL, default_window=4096, default_head_dim=128),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, windows=WindowRule.SWITCHED_ALL, default_window=4096, experts=_QWEN_EXPERTS),
}


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The sparse layers of a mixture of experts: softmax over all experts, the best `experts_per_token` of them taken.

    intermediate_size: inner width of one expert. renormalize: the chosen weights are divided by their sum.
    sparse: for each layer, whether it has experts (else it has the dense MLP of `ModelConfig.intermediate_size`).
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalize: bool
    sparse: tuple[bool, ...]
    names: ExpertNames


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model of the Llama family. Sizes in elements; `max_model_len` in tokens.

    windows: for each layer, how many tokens a query sees, itself included; 0: all before it. A window that the context never fills is 0.
    moe: None for a dense model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    moe: MoeConfig | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` has experts in the place of a dense MLP."""
        return self.moe is not None and self.moe.sparse[layer]


def load_model_config(folder: str | Path) -> ModelConfig:
    """Reads `folder`/config.json. Raises ModelConfigError with the file, the field, its value and what was expected."""
    return parse_model_config(*read_config_json(folder))


def parse_model_config(raw: Mapping[str, Any], file: Path) -> ModelConfig:
    """Pure part of `load_model_config`; `file` is only named in errors."""
    fields = Fields(raw, file)
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    _refuse_unknown_shapes(fields)
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.fail("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads ({num_heads})")
    num_layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    rope, max_model_len = parse_rope(fields, family.default_theta, fields.count("max_position_embeddings"))
    attention_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, family, num_heads),
        max_model_len=max_model_len,
        rms_norm_eps=fields.number("rms_norm_eps", family.default_norm_eps, least=1e-12, most=1.0),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        windows=tuple(window if window < max_model_len else 0 for window in _windows(fields, family, num_layers)),
        moe=None if family.experts is None else _moe(fields, family.experts, num_layers),
    )


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] not in FAMILIES:
        fields.fail("architectures", names, f"must name one of {', '.join(sorted(FAMILIES))}")
    return names[0]


def _refuse_unknown_shapes(fields: Fields) -> None:
    raw = fields.raw
    if raw.get("hidden_act") not in (None, "silu"):
        fields.fail("hidden_act", raw["hidden_act"], "must be silu")
    if raw.get("quantization_config") is not None:
        fields.fail("quantization_config", raw["quantization_config"], "quantized weights are not supported; give float32, float16 or bfloat16")


def _head_dim(fields: Fields, family: Family, num_heads: int) -> int:
    hidden_size = fields.count("hidden_size")
    if fields.raw.get("head_dim") is None and family.default_head_dim is None and hidden_size % num_heads:
        fields.fail("hidden_size", hidden_size, f"must be a multiple of num_attention_heads ({num_heads}) when head_dim is not given")
    head_dim = fields.count("head_dim", family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        fields.fail("head_dim", head_dim, "must be even for rotary embedding")
    return head_dim


def _windows(fields: Fields, family: Family, num_layers: int) -> list[int]:
    """One window for each layer, 0 for full attention."""
    rule = family.windows
    given = fields.raw.get("sliding_window", family.default_window)
    if rule in (WindowRule.SWITCHED_TAIL, WindowRule.SWITCHED_ALL) and not fields.flag("use_sliding_window", False):
        given = None
    if given is not None and rule is WindowRule.NEVER:
        fields.fail("sliding_window", given, "this architecture has full attention only; must be null")
    window = 0 if given is None else fields.count("sliding_window", family.default_window)
    types = fields.raw.get("layer_types")
    # Mistral's class in transformers ignores layer_types and says so in a warning; they are what such a model was trained with.
    if types is None:
        first = fields.count("max_window_layers", 28, least=0) if window and rule is WindowRule.SWITCHED_TAIL else 0
        return [window if layer >= first else 0 for layer in range(num_layers)]
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or any(not isinstance(kind, str) or kind not in known for kind in types):
        fields.fail("layer_types", types, f"must be a list of {num_layers} (num_hidden_layers) of {', '.join(known)}")
    if not window and "sliding_attention" in types:
        fields.fail("layer_types", types, "has sliding_attention, but this model has no sliding_window")
    return [known[kind] for kind in types]


def _moe(fields: Fields, names: ExpertNames, num_layers: int) -> MoeConfig:
    # Published Qwen3 folders say num_experts; Mixtral's, and whatever transformers 5 saves, num_local_experts.
    field = "num_experts" if fields.raw.get("num_experts") is not None else "num_local_experts"
    num_experts = fields.count(field, 8 if names is _MIXTRAL_EXPERTS else 128, most=min(MOST_EXPERTS, MOST_EXPERTS_OF_ALL_LAYERS // num_layers))
    other = fields.count("num_local_experts", num_experts)
    if other != num_experts:
        fields.fail("num_local_experts", other, f"must be num_experts ({num_experts}) when both are given")
    mixtral = names is _MIXTRAL_EXPERTS
    experts_per_token = fields.count("num_experts_per_tok", 2 if mixtral else 8)
    if experts_per_token > num_experts:
        fields.fail("num_experts_per_tok", experts_per_token, f"must not be above {field} ({num_experts})")
    dense = fields.indexes("mlp_only_layers", num_layers)
    step = fields.count("decoder_sparse_step", 1)
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=fields.count("intermediate_size") if mixtral else fields.count("moe_intermediate_size"),
        renormalize=mixtral or fields.flag("norm_topk_prob", False),
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        names=names,
    )
