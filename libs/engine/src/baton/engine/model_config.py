"""What config.json of a Hugging Face folder says about a model, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from baton.engine.errors import ModelConfigError

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Family:
    """Where one architecture differs from Llama. qkv_bias None: config.json's attention_bias decides, for qkv and o alike."""

    qkv_bias: bool | None = None
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear or llama3; the last four fields belong to the scaled kinds (llama3 uses all)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model of the Llama family. Sizes in elements; `max_model_len` in tokens."""

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


def load_model_config(folder: str | Path) -> ModelConfig:
    """Reads `folder`/config.json. Raises ModelConfigError with the file, the field, its value and what was expected."""
    file = Path(folder) / CONFIG_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelConfigError(file, "file", None, "not found; a Hugging Face model folder holds config.json and *.safetensors") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelConfigError(file, "file", None, f"cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(file, "file", type(raw).__name__, "must be a JSON object")
    return parse_model_config(raw, file)


def parse_model_config(raw: Mapping[str, Any], file: Path) -> ModelConfig:
    """Pure part of `load_model_config`; `file` is only named in errors."""
    fields = _Fields(raw, file)
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    _refuse_unknown_shapes(fields)
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.fail("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads ({num_heads})")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        fields.fail("hidden_size", hidden_size, f"must be a multiple of num_attention_heads ({num_heads}) when head_dim is not given")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        fields.fail("head_dim", head_dim, "must be even for rotary embedding")
    attention_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
    )


class _Fields:
    """Typed reading of config.json; a value of the wrong kind is an error that names it."""

    def __init__(self, raw: Mapping[str, Any], file: Path) -> None:
        self.raw = raw
        self._file = file

    def fail(self, field: str, value: object, expected: str) -> None:
        raise ModelConfigError(self._file, field, value, expected)

    def count(self, field: str, default: int | None = None) -> int:
        value = self.raw.get(field)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(field, value, "must be a whole number of at least 1")
        return cast("int", value)

    def number(self, field: str, default: float | None = None) -> float:
        value = self.raw.get(field)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            self.fail(field, value, "must be a number above 0")
        return float(cast("float", value))

    def flag(self, field: str, default: bool) -> bool:
        value = self.raw.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(field, value, "must be true or false")
        return bool(value)

    def inside(self, field: str, value: object) -> _Fields:
        if not isinstance(value, dict):
            self.fail(field, value, "must be a JSON object")
        return _Fields(cast("dict[str, Any]", value), self._file)


def _architecture(fields: _Fields) -> str:
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        fields.fail("architectures", names, f"must name one of {', '.join(sorted(FAMILIES))}")
    return str(cast("list[str]", names)[0])


def _refuse_unknown_shapes(fields: _Fields) -> None:
    raw = fields.raw
    if raw.get("hidden_act", "silu") != "silu":
        fields.fail("hidden_act", raw["hidden_act"], "must be silu")
    if raw.get("quantization_config") is not None:
        fields.fail("quantization_config", raw["quantization_config"], "quantized weights are not supported; give float32, float16 or bfloat16")
    # Qwen carries a window that use_sliding_window switches off; Mistral's is on whenever it is there.
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window", True):
        fields.fail("sliding_window", raw["sliding_window"], "sliding-window attention is not supported; full attention only (null)")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        fields.fail("partial_rotary_factor", raw["partial_rotary_factor"], "must be 1.0")


def _rope(fields: _Fields) -> RopeConfig:
    # transformers 5 writes rope_parameters; 4 wrote rope_theta beside rope_scaling.
    name = "rope_parameters" if fields.raw.get("rope_parameters") is not None else "rope_scaling"
    given = fields.raw.get(name)
    scaling = fields.inside(name, {} if given is None else given)
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = scaling.raw.get("rope_type", scaling.raw.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=scaling.number("factor"))
    if kind != "llama3":
        fields.fail(f"{name}.rope_type", kind, "must be one of default, linear, llama3")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.count("original_max_position_embeddings"),
    )
