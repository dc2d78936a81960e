"""A GGUF file of the Llama family becomes a Hugging Face folder with float32 weights.

The weights are dequantised, not requantised: whoever reads the folder computes with exactly the numbers that the GGUF file means.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from baton.cli.errors import ConversionError
from baton.cli.model.tokenizer import TokenizerParts, build_tokenizer, tokenizer_config

# Raised whenever the same GGUF file would become another folder: folders of an older converter are built again.
CONVERTER_VERSION = 1

Floats = npt.NDArray[np.float32]
Progress = Callable[[int], None]

WHOLE_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `folder`.

    `progress` is told the number of tensors done. Raises ConversionError for an architecture, tokenizer or tensor that is not known.
    """
    reader = gguf.GGUFReader(source)
    config = model_config(reader)
    parts = tokenizer_parts(reader)
    tensors = read_tensors(reader, config, progress)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    check_names(set(tensors), config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(parts).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(parts))
    write_json(folder / "config.json", config)
    ids = {"bos_token_id": parts.bos_id, "eos_token_id": parts.eos_id, "pad_token_id": parts.padding_id}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})


def num_tensors(source: Path) -> int:
    return len(gguf.GGUFReader(source).tensors)


def model_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    architecture = field(reader, "general.architecture")
    if architecture != "llama":
        raise ConversionError(f"general.architecture is {architecture!r}; only 'llama' can be converted")
    for unknown in ("llama.rope.scaling.type", "llama.expert_count"):
        if reader.get_field(unknown) is not None:
            raise ConversionError(f"{unknown} is {field(reader, unknown)!r}; models that set it cannot be converted")
    hidden, num_heads = field(reader, "llama.embedding_length"), field(reader, "llama.attention.head_count")
    head_dim = field(reader, "llama.rope.dimension_count")
    if head_dim * num_heads != hidden:
        raise ConversionError(f"llama.rope.dimension_count {head_dim} x {num_heads} heads is not the hidden size {hidden}")
    # A float32 in the file: its shortest decimal spelling is the number that the model's authors wrote.
    epsilon = float(str(np.float32(field(reader, "llama.attention.layer_norm_rms_epsilon"))))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rms_norm_eps": epsilon,
        "rope_theta": float(field(reader, "llama.rope.freq_base")),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def tokenizer_parts(reader: gguf.GGUFReader) -> TokenizerParts:
    return TokenizerParts(
        model=field(reader, "tokenizer.ggml.model"),
        pre_tokenizer=field(reader, "tokenizer.ggml.pre"),
        tokens=field(reader, "tokenizer.ggml.tokens"),
        token_types=field(reader, "tokenizer.ggml.token_type"),
        merges=[split_merge(merge) for merge in field(reader, "tokenizer.ggml.merges")],
        bos_id=field(reader, "tokenizer.ggml.bos_token_id"),
        eos_id=field(reader, "tokenizer.ggml.eos_token_id"),
        unknown_id=field(reader, "tokenizer.ggml.unknown_token_id"),
        padding_id=field(reader, "tokenizer.ggml.padding_token_id"),
        chat_template=field(reader, "tokenizer.chat_template"),
        adds_bos=field(reader, "tokenizer.ggml.add_bos_token"),
        context_len=field(reader, "llama.context_length"),
    )


def split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def read_tensors(reader: gguf.GGUFReader, config: dict[str, Any], progress: Progress) -> dict[str, Floats]:
    """Every tensor in float32 under its Hugging Face name; projections are [out features, in features]."""
    tensors: dict[str, Floats] = {}
    for index, tensor in enumerate(reader.tensors):
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        name = hugging_face_name(tensor.name)
        if name.endswith("q_proj.weight"):
            weights = restore_rotary_order(weights, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weights = restore_rotary_order(weights, config["num_key_value_heads"])
        tensors[name] = np.ascontiguousarray(weights)
        progress(index + 1)
    return tensors


def hugging_face_name(name: str) -> str:
    if name in WHOLE_MODEL_NAMES:
        return WHOLE_MODEL_NAMES[name]
    match = LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ConversionError(f"tensor {name!r} has no place in a Llama decoder")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def restore_rotary_order(weights: Floats, num_heads: int) -> Floats:
    """GGUF pairs a head's rotary dimensions as (0, 1), (2, 3), ...; Hugging Face pairs them as (0, half), (1, half + 1), ..."""
    rows, columns = weights.shape
    return weights.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def check_names(names: set[str], config: dict[str, Any]) -> None:
    wanted = {"model.embed_tokens.weight", "model.norm.weight"}
    wanted |= {f"model.layers.{layer}.{part}.weight" for layer in range(config["num_hidden_layers"]) for part in LAYER_NAMES.values()}
    if not config["tie_word_embeddings"]:
        wanted.add("lm_head.weight")
    if names != wanted:
        raise ConversionError(f"the file lacks {sorted(wanted - names)[:5]} and has {sorted(names - wanted)[:5]} too many")


def field(reader: gguf.GGUFReader, name: str) -> Any:
    entry = reader.get_field(name)
    if entry is None:
        raise ConversionError(f"the GGUF file has no field {name}")
    return entry.contents()


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
