"""Folders that must not be served, though each looks plausible: nonsense sizes, hidden contradictions, files that cannot be read."""

from __future__ import annotations

import json
import logging
import os
import shutil
from math import inf, nan
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.engine import (
    EngineConfig,
    InsufficientMemoryError,
    InvalidSettingError,
    ModelConfigError,
    Role,
    WeightsError,
    load_model,
    load_model_config,
    prepare,
)
from baton.engine.folder_file import why_unreadable
from baton.engine.model_config import parse_model_config
from baton.engine.rope import inverse_frequencies
from baton.engine.shard import shard_config

FILE = Path("somewhere/config.json")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 132,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
HUGE = 10**400


def rope(**changes):
    return {"rope_parameters": {"rope_theta": 10000.0, **changes}}


@pytest.mark.parametrize(
    ("base", "changes", "field", "words"),
    [
        (LLAMA, {"num_hidden_layers": 10**12}, "num_hidden_layers", "at most 4096"),
        (LLAMA, {"num_hidden_layers": 4097}, "num_hidden_layers", "at most 4096"),
        (MOE, {"num_experts": 10**9}, "num_experts", "at most 65536"),
        (MOE, {"num_experts": 65536, "num_hidden_layers": 4096}, "num_experts", "at most 64"),
        (LLAMA, {"vocab_size": 2**31 + 1}, "vocab_size", "at most 2147483648"),
        (LLAMA, {"hidden_size": HUGE}, "hidden_size", "at most 2147483648"),
        (LLAMA, {"max_position_embeddings": HUGE}, "max_position_embeddings", "at most 2147483648"),
        (LLAMA, {"architectures": [["x"]]}, "architectures", "must name one of"),
        (LLAMA, {"architectures": [{}]}, "architectures", "must name one of"),
        (QWEN3, {"layer_types": [["full_attention"], ["full_attention"]]}, "layer_types", "must be a list of 2"),
        *((LLAMA, {"rms_norm_eps": value}, "rms_norm_eps", "at most 1$") for value in (HUGE, inf, nan, 1e300)),
        *((LLAMA, {"rope_theta": value}, "rope_theta", r"of at least 1\.001") for value in (HUGE, inf, nan, 1, 0.5, 1e300)),
        (LLAMA, {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 1}}, r"rope_parameters\.rope_theta", r"of at least 1\.001"),
        *((LLAMA, rope(rope_type="linear", factor=value), r"rope_parameters\.factor", "at most 1e") for value in (inf, nan, HUGE, 1e-320)),
        *((LLAMA, rope(**{**YARN, "factor": value}), r"rope_parameters\.factor", "at most 1e") for value in (inf, 1e308, 1e306, HUGE)),
        *((LLAMA, rope(**YARN, beta_fast=value), r"rope_parameters\.beta_fast", "at most 1e") for value in (inf, 1e-320)),
        (LLAMA, rope(**YARN, attention_factor=inf), r"rope_parameters\.attention_factor", "at most 1e"),
        (LLAMA, rope(**YARN, mscale=inf, mscale_all_dim=inf), r"rope_parameters\.mscale", "at most 1e"),
        (LLAMA, rope(**{**YARN, "original_max_position_embeddings": HUGE}), r"rope_parameters\.original_max_position_embeddings", "at most"),
        (LLAMA, rope(**{**YARN, "original_max_position_embeddings": 2**30}), r"rope_parameters\.factor", "at most 2147483648"),
        (LLAMA, rope(**{**LLAMA3, "high_freq_factor": 1.0}), r"rope_parameters\.low_freq_factor", r"below high_freq_factor \(1\.0\)"),
        (LLAMA, rope(**{**LLAMA3, "low_freq_factor": 8.0}), r"rope_parameters\.low_freq_factor", r"below high_freq_factor \(4\.0\)"),
        (LLAMA, {"rope_scaling": {"factor": 8.0}}, r"rope_scaling\.factor", "without rope_type"),
        (LLAMA, rope(rope_type=None, factor=8.0), r"rope_parameters\.factor", "without rope_type"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"rope_parameters\.full_attention", "all layers share one"),
        (LLAMA, rope(rope_type=["yarn"]), r"rope_parameters\.rope_type", "must be one of"),
        (LLAMA, {**rope(), "rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling", "contradicts rope_parameters"),
        (LLAMA, {"rope_parameters": {"rope_theta": 5000.0}}, "rope_theta", r"contradicts the rope_theta of rope_parameters, 5000\.0"),
    ],
)
def test_nonsense_is_refused_by_name(base, changes, field, words):
    with pytest.raises(ModelConfigError, match=rf"^somewhere/config\.json: {field} = .*{words}") as error:
        parse_model_config({**base, **changes}, FILE)
    assert len(str(error.value)) < 700


def test_what_says_the_same_twice_is_taken():
    linear = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert parse_model_config({**LLAMA, **linear}, FILE).rope.factor == 4.0
    plain = parse_model_config(LLAMA, FILE)
    nulls = {"partial_rotary_factor": None, "hidden_act": None, "rope_parameters": None, "rope_scaling": {"rope_type": None, "factor": None}}
    assert parse_model_config({**LLAMA, **nulls}, FILE) == plain
    assert parse_model_config({**LLAMA, "rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "default"}}, FILE) == plain


def test_the_widest_rope_that_is_taken_has_finite_frequencies():
    for changes in (rope(**{**YARN, "factor": 1e6}, beta_fast=1e6, beta_slow=1e-6), {"rope_theta": 1e15}, {"rope_theta": 1.001}):
        config = parse_model_config({**LLAMA, "rope_theta": None, **changes}, FILE)
        assert inverse_frequencies(config.rope, 8).isfinite().all()


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Qwen3Moe"])
def test_a_window_that_is_switched_on_without_a_size_is_that_of_transformers(family):
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if family == "Qwen3Moe" else {}
    said = {**LLAMA, **more, "max_position_embeddings": 8192, "use_sliding_window": True, "max_window_layers": 1}
    theirs = getattr(transformers, f"{family}Config")(**{name: value for name, value in said.items() if name != "architectures"})
    ours = parse_model_config({**said, "architectures": [f"{family}ForCausalLM"]}, FILE)
    assert theirs.sliding_window == 4096
    assert ours.windows == ((4096, 4096) if family == "Qwen3Moe" else (0, 4096))


def test_a_degree_that_does_not_fit_is_refused_at_once_and_the_message_lists_those_that_do():
    config = parse_model_config({**LLAMA, "vocab_size": 2**31 - 1, "num_attention_heads": 2, "num_key_value_heads": 2}, FILE)
    with pytest.raises(InvalidSettingError, match=r"must divide vocab_size \(2147483647\); this model takes 1$"):
        shard_config(config, 2)
    wide = {"vocab_size": 2**30, "num_attention_heads": 256, "num_key_value_heads": 256, "intermediate_size": 1024}
    with pytest.raises(InvalidSettingError, match=r"this model takes 1, 2, 4, 8, 16, 32, 64$"):
        shard_config(parse_model_config({**LLAMA, **wide}, FILE), 3)


@pytest.mark.parametrize(
    "text", ['{"vocab_size": 1' + "0" * 5000 + "}", "[" * 200_000, "\xe9", "", "null"], ids=["digits", "nested", "latin", "empty", "null"]
)
def test_a_config_that_cannot_be_read(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelConfigError, match=rf"^{tmp_path}/config\.json: (cannot be read as JSON: |must be a JSON object)"):
        load_model_config(tmp_path)


PIPE, FOLDER, DANGLING, LOOP = "pipe", "folder", "dangling", "loop"
PLACED = [(PIPE, "is not a regular file"), (FOLDER, "is a folder"), (DANGLING, "is a link to nowhere, which is not there"), (LOOP, "cannot be read")]


def place(kind, file):
    file.unlink(missing_ok=True)
    {
        PIPE: lambda: os.mkfifo(file),
        FOLDER: file.mkdir,
        DANGLING: lambda: file.symlink_to("nowhere"),
        LOOP: lambda: file.symlink_to(file.name),
    }[kind]()


@pytest.fixture
def folder(make_model, tmp_path):
    return Path(shutil.copytree(make_model("llama", tie_word_embeddings=False).folder, tmp_path / "model"))


@pytest.mark.parametrize(("kind", "words"), PLACED)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_never_opened(folder, name, kind, words):
    place(kind, folder / name)
    with pytest.raises((ModelConfigError, WeightsError), match=rf"^{folder}/{name}: {words}"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_says_so(folder, name):
    """In a child: root, as whom tests may run, reads every file until it is somebody else."""
    (folder / name).chmod(0)
    folder.chmod(0o755)
    found = os.memfd_create("found")
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            os.write(found, (why_unreadable(Path(name)) or "readable").encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    said = os.pread(found, 100, 0)
    os.close(found)
    assert said == b"cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"weight_map": {"a": 1' + "0" * 5000 + "}}", "cannot be read as an index"),
        ("[" * 200_000, "cannot be read as an index"),
        ("[]", "cannot be read as an index"),
        ('{"weight_map": []}', "must be an object from tensors to files"),
        *(
            (json.dumps({"weight_map": {"a": value}}), "places tensor a in .*the name of a file")
            for value in (None, [], "", "a\0b", "/a.safetensors", "../other/a.safetensors")
        ),
    ],
)
def test_an_index_that_is_of_no_use(folder, text, words):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=rf"^{folder}/model\.safetensors\.index\.json: .*{words}"):
        load_model(folder)


def test_a_shard_that_is_not_there_is_told_before_anything_is_read(folder):
    names = list(load_file(folder / "model.safetensors"))
    places = {name: "absent.safetensors" if name == names[-1] else "model.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    told = []
    with pytest.raises(WeightsError, match=rf"/absent\.safetensors: not found; model\.safetensors\.index\.json places tensor {names[-1]} there"):
        prepare(folder, EngineConfig(num_pages=8), Role.PLAIN, progress=lambda *each: told.append(each))
    assert told == []


def test_the_only_shard_of_an_index_is_missed_as_one(folder):
    """Not as the single file of a folder that has no index."""
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    with pytest.raises(WeightsError, match=rf"/model\.safetensors: not found; model\.safetensors\.index\.json places tensor {names[0]} there$"):
        load_model(folder)


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def add_tensor(folder, name, tensor):
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file)


def test_a_layer_that_the_config_leaves_out(folder):
    change_config(folder, num_hidden_layers=1)
    with pytest.raises(
        WeightsError, match=r"model\.safetensors: tensor model\.layers\.[12]\..* has no place in the model that config\.json describes"
    ):
        load_model(folder)


def test_a_bias_that_the_config_leaves_out(folder):
    add_tensor(folder, "model.layers.0.self_attn.q_proj.bias", torch.ones(48))
    with pytest.raises(WeightsError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.bias has no place"):
        load_model(folder)


def test_norms_that_the_architecture_leaves_out(make_model, tmp_path):
    folder = Path(shutil.copytree(make_model("qwen3").folder, tmp_path / "model"))
    change_config(folder, architectures=["LlamaForCausalLM"], layer_types=None, use_sliding_window=None)
    with pytest.raises(WeightsError, match=r"tensor model\.layers\.\d\.self_attn\.[qk]_norm\.weight has no place"):
        load_model(folder)


def test_a_head_that_tied_embeddings_leave_out_is_told(folder, caplog):
    change_config(folder, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        load_model(folder)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"{folder}/model.safetensors: tensor lm_head.weight differs from model.embed_tokens.weight, but config.json"
    )
    caplog.clear()
    add_tensor(folder, "lm_head.weight", load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone())
    with caplog.at_level(logging.WARNING):
        load_model(folder)
    assert caplog.records == []


def test_a_model_larger_than_the_machine_names_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 2**31}))
    with pytest.raises(InsufficientMemoryError, match=rf"its sizes are those in {tmp_path}/config\.json"):
        prepare(tmp_path, EngineConfig(num_pages=8), Role.PLAIN, load_format="dummy")
