"""Reading weights: checked before any byte is read, in parts, with progress; and dummies that need no files."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from engine_reference import answers, engine, prompts, request, run
from safetensors.torch import load_file, save_file

from baton.engine import EngineConfig, WeightsError, fingerprint, load_model, load_model_config
from baton.engine.dummy_weights import DummyReader
from baton.engine.inventory import inventory
from baton.engine.linear import Tuning
from baton.engine.models.llama import LlamaModel
from baton.engine.progress import ProgressLog
from baton.engine.weights import Part, WeightReader

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}


@pytest.fixture(scope="module")
def moe(make_model):
    return make_model("qwen3_moe", **MOE)


@pytest.fixture
def copied(moe, tmp_path):
    return shutil.copytree(moe.folder, tmp_path / "model")


def damage(folder, name, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed.contiguous()}, file)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.layers.2.mlp.experts.3.up_proj.weight", lambda _: None, r"is missing; expected shape \[24, 48\]"),
        ("model.layers.1.mlp.gate.weight", lambda tensor: tensor[:3], r"has shape \[3, 48\]; config.json makes it \[4, 48\]"),
        ("model.norm.weight", lambda tensor: tensor.long(), "has type I64; expected one of F32, F16, BF16"),
    ],
)
def test_a_damaged_folder_is_refused_before_a_byte_is_read(copied, name, change, words):
    damage(copied, name, change)
    told = []
    with pytest.raises(WeightsError, match=rf"model\.safetensors: tensor {name} {words}"):
        load_model(copied, progress=lambda done, total: told.append((done, total)))
    assert told == []


def test_progress_counts_the_stored_bytes_of_what_the_model_reads(copied):
    damage(copied, "model.norm.weight", lambda tensor: tensor.half())
    file = copied / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    told = []
    load_model(copied, progress=lambda done, total: told.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert told[-1] == (total, total)
    assert {size for _, size in told} == {total}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert len(told) == len(tensors)


def test_the_progress_log_speaks_once_a_second_and_at_the_end():
    lines, now = [], [0.0]
    log = ProgressLog(lines.append, clock=lambda: now[0])
    for tenth in range(1, 36):
        now[0] = tenth / 10
        log(tenth * 100_000_000, 3_500_000_000)
    assert lines == [
        "weights: 1.00 of 3.50 GB in 1.0 s, 1.00 GB/s",
        "weights: 2.00 of 3.50 GB in 2.0 s, 1.00 GB/s",
        "weights: 3.00 of 3.50 GB in 3.0 s, 1.00 GB/s",
        "weights: 3.50 of 3.50 GB in 3.5 s, 1.00 GB/s",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_a_slice_of_the_whole_in_memory_of_its_own(moe, dtype):
    name, shape = "model.layers.0.mlp.down_proj.weight", (48, 80)
    with WeightReader(moe.folder, dtype) as reader:
        whole = reader.read(name, shape, "cpu")
        assert torch.equal(whole, moe.theirs.state_dict()[name].to(dtype))
        for axis, start, stop in ((0, 0, 12), (0, 36, 48), (1, 40, 80)):
            part = reader.read(name, shape, part=Part(axis, start, stop))
            assert torch.equal(part, whole.narrow(axis, start, stop - start))
            assert part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.nbytes
        with pytest.raises(WeightsError, match=r"config.json makes it \[48, 81\]"):
            reader.read(name, (48, 81), part=Part(0, 0, 1))


def test_dummies_are_the_same_everywhere_and_no_two_alike():
    shape = (1500, 1024)
    first = DummyReader(torch.float32).read("model.layers.0.self_attn.q_proj.weight", shape)
    again = DummyReader(torch.float32)
    again.read("something.else", (7, 3))
    assert torch.equal(again.read("model.layers.0.self_attn.q_proj.weight", shape, "cpu"), first)
    assert not torch.equal(again.read("model.layers.1.self_attn.q_proj.weight", shape), first)
    assert not torch.equal(DummyReader(torch.float32, seed=1).read("model.layers.0.self_attn.q_proj.weight", shape), first)
    assert torch.equal(again.read("model.layers.0.self_attn.q_proj.weight", shape, part=Part(1, 512, 1024)), first[:, 512:])
    assert len(torch.unique(first, dim=0)) == shape[0]
    assert float(first.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(first.mean())) < 1e-4
    for size in (1, 1_048_582, 1_048_583, 1_048_584, 3_000_000):
        assert again.read("any", (size,)).unique().numel() > min(size, 1_000_000) * 0.9
    assert again.read("model.norm.weight", (64,)).eq(1).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_dummies_needs_only_its_config(moe, tmp_path, dtype):
    shutil.copy(moe.folder / "config.json", tmp_path)
    told = []
    models = [load_model(tmp_path, dtype, load_format="dummy", progress=lambda done, total: told.append((done, total))) for _ in range(2)]
    assert told[-1][0] == told[-1][1] == sum(spec.num_elements for spec in inventory(models[0].config)) * models[0].dtype.itemsize
    prompt = prompts([20])[0]
    texts = []
    for model in models:
        plain = engine(model, dtype=dtype)
        plain.add(request(1, prompt, max_tokens=8, temperature=1.0, seed=3))
        texts.append(answers(run(plain))[1])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 2
    with pytest.raises(WeightsError, match="not found"):
        load_model(tmp_path, dtype)


def test_every_tensor_of_a_model_is_in_the_inventory_and_read_once(moe):
    class Counting(DummyReader):
        def read(self, name, shape, device=None, part=None):
            reads.append((name, shape))
            return super().read(name, shape, device, part)

    reads = []
    config = load_model_config(moe.folder)
    LlamaModel(config, Counting(torch.float32), torch.float32, Tuning.FEW_ROWS)
    assert sorted(reads) == sorted((spec.name, spec.shape) for spec in inventory(config))


def test_the_fingerprint_of_dummies_is_that_of_their_config(moe, tmp_path):
    shutil.copy(moe.folder / "config.json", tmp_path)
    config, settings = load_model_config(tmp_path), EngineConfig(num_pages=8)
    dummy = fingerprint(tmp_path, "m", config, settings, "dummy")
    assert dummy == fingerprint(moe.folder, "m", config, settings, "dummy")
    assert dummy != fingerprint(moe.folder, "m", config, settings)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 0.1}))
    assert fingerprint(tmp_path, "m", config, settings, "dummy") != dummy
