"""Model folders that cannot be served: each error names the file, the field or tensor, and what was expected."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from engine_reference import SHAPE
from safetensors.torch import load_file, save_file

from baton.engine import EngineConfig, InvalidSettingError, ModelConfigError, WeightsError, fingerprint, load_model, load_model_config, plan_layout
from baton.engine.model_config import RopeConfig


@pytest.fixture
def folder(tiny, tmp_path):
    target = tmp_path / "model"
    shutil.copytree(tiny.folder, target)
    return target


def edit(folder, **changes):
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    for name, value in changes.items():
        if value is ...:
            raw.pop(name)
        else:
            raw[name] = value
    file.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("architectures", ["GPT2LMHeadModel"], "LlamaForCausalLM"),
        ("architectures", ..., "LlamaForCausalLM"),
        ("hidden_size", "48", "whole number"),
        ("hidden_size", ..., "whole number"),
        ("num_hidden_layers", 0, "at least 1"),
        ("num_attention_heads", True, "whole number"),
        ("num_key_value_heads", 4, r"divide num_attention_heads \(6\)"),
        ("head_dim", 7, "even"),
        ("rms_norm_eps", -1, "above 0"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("hidden_act", "gelu", "silu"),
        ("sliding_window", 128, "full attention only"),
        ("quantization_config", {"bits": 4}, "quantized"),
        ("partial_rotary_factor", 0.5, "1.0"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0}, "default, linear, llama3, yarn; dynamic turns"),
        ("rope_parameters", {"rope_type": "longrope", "factor": 4.0}, "default, linear, llama3, yarn"),
        ("rope_parameters", {"rope_type": "yarn", "factor": -4.0}, "above 0"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 4.0}, "above 0"),
        ("rope_parameters", "none", "JSON object"),
    ],
)
def test_config_errors_name_file_field_and_value(folder, field, value, words):
    edit(folder, **{field: value})
    with pytest.raises(ModelConfigError, match=words) as error:
        load_model_config(folder)
    shown = repr(None if value is ... else value)
    assert str(folder / "config.json") in str(error.value)
    if field != "rope_parameters":
        assert f"{field} = {shown}" in str(error.value)
    else:
        assert "rope" in str(error.value) or "factor" in str(error.value)


def test_a_folder_without_a_readable_config(tmp_path):
    with pytest.raises(ModelConfigError, match=r"config\.json.*not found"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="object"):
        load_model_config(tmp_path)


def test_rope_of_both_generations_of_config(folder):
    edit(folder, rope_parameters=..., rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert load_model_config(folder).rope == RopeConfig(theta=5000.0, kind="linear", factor=2.0)
    edit(folder, rope_scaling=None)
    assert load_model_config(folder).rope == RopeConfig(theta=5000.0)


def test_weights_errors_name_file_tensor_and_shape(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(WeightsError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.down_proj\.weight is missing.*\[48, 80\]"):
        load_model(folder)
    save_file({**tensors, name: tensors[name].T.contiguous()}, file)
    with pytest.raises(WeightsError, match=r"down_proj.weight has shape \[80, 48\].*\[48, 80\]"):
        load_model(folder)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(WeightsError, match="has type I8; expected one of F32, F16, BF16"):
        load_model(folder)
    file.write_bytes(b"not safetensors at all")
    with pytest.raises(WeightsError, match="cannot be read"):
        load_model(folder)
    file.unlink()
    with pytest.raises(WeightsError, match="not found"):
        load_model(folder)


def test_sharded_weights(folder, tiny):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for shard in sorted(set(places.values())):
        save_file({name: tensors[name] for name in names if places[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert torch.equal(load_model(folder)._embedding, tiny.ours._embedding)
    index.write_text(json.dumps({"weight_map": {**places, names[0]: places[names[1]]}}))
    with pytest.raises(WeightsError, match=r"00002\.safetensors: tensor .* is missing although"):
        load_model(folder)
    index.write_text(json.dumps({"weights": {}}))
    with pytest.raises(WeightsError, match="weight_map"):
        load_model(folder)


def test_the_fingerprint_sees_what_matters(folder, tiny):
    config = EngineConfig(num_pages=8)
    model = load_model_config(folder)
    base = fingerprint(folder, "tiny", model, config)
    assert base == fingerprint(tiny.folder, "tiny", model, EngineConfig(num_pages=99))
    assert base != fingerprint(folder, "other", model, config)
    assert fingerprint(folder, "tiny", model, EngineConfig(num_pages=8, dtype="bfloat16")).dtype == "bfloat16"
    assert fingerprint(folder, "tiny", model, EngineConfig(num_pages=8, page_size=32)).page_size == 32
    (folder / "extra.safetensors").symlink_to("nowhere")  # nothing is read from it
    assert fingerprint(folder, "tiny", model, config) == base
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert fingerprint(folder, "tiny", model, config).weights != base.weights
    (folder / "model.safetensors").unlink()
    shutil.copy(tiny.folder / "model.safetensors", folder)
    assert fingerprint(folder, "tiny", model, config) == base
    edit(folder, rms_norm_eps=1e-4)
    assert fingerprint(folder, "tiny", model, config).weights != base.weights
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors: not found"):
        fingerprint(folder, "tiny", model, config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_pages": 4, "kv_bytes": 4}, "one of the two, not both"),
        ({"num_pages": 0}, "num_pages = 0"),
        ({"num_pages": 4, "page_size": 0}, "page_size = 0"),
        ({"num_pages": 4, "dtype": "float16"}, "float32, bfloat16"),
        ({"num_pages": 4, "max_running": 9, "max_num_batched_tokens": 8}, "max_running = 9"),
        ({"num_pages": 4, "growth_tokens": -1}, "growth_tokens = -1"),
        ({"num_pages": 4, "num_threads": 0}, "num_threads = 0"),
        ({"num_pages": 4, "num_threads": 4097}, "num_threads = 4097: must be at most 4096"),
    ],
)
def test_settings_out_of_range_name_themselves(settings, words):
    with pytest.raises(InvalidSettingError, match=words):
        EngineConfig(**settings)


def test_the_pool_is_planned_from_pages_or_bytes(tiny):
    model = tiny.ours.config
    by_pages = plan_layout(model, EngineConfig(num_pages=10, page_size=16))
    assert by_pages.pool_bytes == 10 * 16 * 2 * SHAPE["num_hidden_layers"] * 2 * 8 * 4
    by_bytes = plan_layout(model, EngineConfig(kv_bytes=by_pages.pool_bytes + 5))
    assert by_bytes == by_pages
    with pytest.raises(InvalidSettingError, match="one of the two must be set"):
        plan_layout(model, EngineConfig())
    with pytest.raises(InvalidSettingError, match=rf"{by_pages.pool_bytes // 10} bytes"):
        plan_layout(model, EngineConfig(kv_bytes=100))


def test_memory_that_cannot_hold_the_pool_is_refused(tiny):
    from engine_reference import engine

    from baton.engine.errors import BufferTooSmallError

    size = engine(tiny.ours).layout.pool_bytes
    with pytest.raises(BufferTooSmallError, match=str(size)):
        engine(tiny.ours, buffer=memoryview(bytearray(size - 1)))
    with pytest.raises(BufferTooSmallError, match="read-only"):
        engine(tiny.ours, buffer=memoryview(bytes(size)))
    aligned = memoryview(torch.empty(size + 64, dtype=torch.uint8).numpy())
    with pytest.raises(BufferTooSmallError, match="aligned"):
        engine(tiny.ours, buffer=aligned[4:])
