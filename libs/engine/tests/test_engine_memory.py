"""What an engine will take, against what it does take and against what is free."""

from __future__ import annotations

import pytest
import torch
from engine_reference import engine

from baton.engine import EngineConfig, Role, load_model, plan_layout
from baton.engine.device.model import DeviceModel
from baton.engine.device.steps import DecodeSteps
from baton.engine.errors import InsufficientMemoryError, RankFailedError
from baton.engine.memory import (
    MemoryNeed,
    cpu_free_bytes,
    cpu_need,
    cpu_weight_bytes,
    device_need,
    require_memory,
    table_bytes,
    weight_bytes,
    workspace_bytes,
)
from baton.engine.pool import KVPool
from baton.engine.weights import WeightReader

MODELS = {
    "tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "own head": ("qwen2", {"tie_word_embeddings": False}),
    "experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}),
    "experts of another name": ("mixtral", {"num_local_experts": 4}),
}


def held_bytes(held, seen=None):
    """Bytes of all tensors that an object reaches."""
    seen = set() if seen is None else seen
    if id(held) in seen or isinstance(held, (str, int, float, type)) or held is None:
        return 0
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, (list, tuple)):
        return sum(held_bytes(each, seen) for each in held)
    names = list(getattr(held, "__dict__", {})) + list(getattr(type(held), "__slots__", ()))
    return sum(held_bytes(getattr(held, name), seen) for name in names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("case", MODELS)
def test_weights_take_what_was_foreseen(make_model, case, role, dtype):
    family, config = MODELS[case]
    model = load_model(make_model(family, **config).folder, dtype, role)
    epsilon = 4
    assert held_bytes(model) == cpu_weight_bytes(model.config, dtype, role) + table_bytes(model.config) + epsilon


def test_the_ranks_of_a_group_together_hold_one_model(tiny):
    config = tiny.ours.config
    whole, half = weight_bytes(config, 2), weight_bytes(config, 2, degree=2)
    norms = (2 * config.num_layers + 1) * config.hidden_size * 2
    assert 2 * half == whole + norms
    settings = EngineConfig(num_pages=8)
    assert 2 * device_need(config, settings, 2).kv_pool == device_need(config, settings).kv_pool


def test_workspace_follows_rows_samples_and_experts(tiny, make_model):
    config = tiny.ours.config
    base = workspace_bytes(config, 4, 100, 10)
    assert workspace_bytes(config, 4, 200, 20) == 2 * base
    assert workspace_bytes(config, 4, 100, 11) - base == config.vocab_size * 28
    experts = make_model("mixtral", num_local_experts=4).ours.config
    assert workspace_bytes(experts, 4, 100, 10) > base


def test_what_fits_to_the_byte_passes_and_one_less_names_every_number():
    need = MemoryNeed(weights=16_000_000_000, kv_pool=8_000_000_000, tables=64 << 20, workspace=1_000_000_000)
    require_memory(need, need.total, "cuda:0", page_bytes=2_000_000)
    with pytest.raises(InsufficientMemoryError) as error:
        require_memory(need, need.total - 1, "cuda:0", page_bytes=2_000_000)
    assert str(error.value) == (
        "memory of cuda:0: weights 16.000 GB + KV pool 8.000 GB + rotation table 0.067 GB + workspace of a step 1.000 GB = 25.067 GB, "
        "but 25.067 GB are free; lower kv_bytes to at most 7999999999, or num_pages to at most 3999"
    )


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (20_000_000_000, r"20\.000 GB are free; lower kv_bytes to at most 3000000000, or num_pages to at most 1500"),
        (16_500_000_000, r"lower max_num_batched_tokens and max_running, then kv_bytes or num_pages"),
        (16_001_000_000, r"the weights alone do not leave room for a page"),
        (0, r"0 bytes are free; the weights alone"),
    ],
)
def test_the_remedy_is_one_that_helps(free, words):
    need = MemoryNeed(weights=16_000_000_000, kv_pool=8_000_000_000, tables=0, workspace=1_000_000_000)
    with pytest.raises(InsufficientMemoryError, match=words):
        require_memory(need, free, "cpu", page_bytes=2_000_000)
    assert free < need.weights + 2_000_000 or "weights alone" not in words


def test_following_the_remedy_makes_it_fit(tiny):
    config = EngineConfig(num_pages=1_000_000)
    need = cpu_need(tiny.ours.config, config, Role.PLAIN)
    page_bytes = plan_layout(tiny.ours.config, EngineConfig(num_pages=1)).pool_bytes
    free = need.total - need.kv_pool // 2 - 1
    with pytest.raises(InsufficientMemoryError) as error:
        require_memory(need, free, "cpu", page_bytes)
    num_pages = int(str(error.value).rsplit(" ", 1)[1])
    require_memory(cpu_need(tiny.ours.config, EngineConfig(num_pages=num_pages), Role.PLAIN), free, "cpu", page_bytes)
    with pytest.raises(InsufficientMemoryError):
        require_memory(cpu_need(tiny.ours.config, EngineConfig(num_pages=num_pages + 1), Role.PLAIN), free, "cpu", page_bytes)


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_free_memory_is_the_machines_or_the_control_groups(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 80 kB\n")
    write(proc / "self", cgroup="0::/box/inner\n")
    write(groups, cgroup__controllers="")
    assert cpu_free_bytes(proc, groups) == 80 * 1024
    write(groups / "box", memory__max="50000\n", memory__current="30000\n", memory__stat="anon 1\ninactive_file 5000\n")
    write(groups / "box" / "inner", memory__max="max\n", memory__current="30000\n", memory__stat="anon 1\n")
    assert cpu_free_bytes(proc, groups) == 25000
    write(groups / "box" / "inner", memory__max="30000\n")
    assert cpu_free_bytes(proc, groups) == 0
    old = tmp_path / "old"
    write(proc / "self", cgroup="9:cpu:/\n4:memory:/docker/abc\n0::/\n")
    # Inside a container the group's own path is not mounted; the mount's root is the group.
    write(old / "memory", memory__limit_in_bytes="40000", memory__usage_in_bytes="10000", memory__stat="total_inactive_file 1000\n")
    assert cpu_free_bytes(proc, old) == 31000


def test_this_machine_says_what_is_free():
    assert 0 < cpu_free_bytes() < 1 << 50


def test_a_pool_that_the_machine_does_not_give_is_told(tiny):
    """Not by arithmetic: the allocation fails."""
    layout = plan_layout(tiny.ours.config, EngineConfig(num_pages=1 << 40))
    with pytest.raises(InsufficientMemoryError) as told:
        KVPool(layout, torch.float32)
    text = str(told.value)
    assert text.startswith(
        f"memory of cpu: the KV pool of {1 << 40} pages, {layout.pool_bytes} bytes, did not fit: {layout.pool_bytes} bytes more were"
    )
    assert " GB are free; lower kv_bytes or num_pages" in text


def greedy_for_memory(*given, **named):
    """In the place of what allocates: wants more than there is, and the allocator says so."""
    torch.empty(1 << 50, dtype=torch.uint8)


def test_a_step_without_memory_ends_the_warming_up_with_what_to_lower(tiny, monkeypatch):
    plain = engine(tiny.ours)
    monkeypatch.setattr(plain._runner, "launch", greedy_for_memory)
    with pytest.raises(InsufficientMemoryError, match=r"cpu: a first step of 64 tokens did not fit: 1125899906842624 bytes .* max_num_batched"):
        plain.warm_up()


@pytest.mark.parametrize("behind", [True, False], ids=["behind the end of a capture", "a rank's"])
def test_captured_steps_without_memory_are_told_whatever_is_raised_in_front(tiny, monkeypatch, behind):
    def prepare(*given, **named):
        try:
            greedy_for_memory()
        except RuntimeError as error:
            if not behind:
                raise RankFailedError(1, 2, error) from error
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    with torch.inference_mode(), WeightReader(tiny.folder, torch.float32) as reader:
        model = DeviceModel(tiny.ours.config, reader, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(DecodeSteps, "prepare", prepare)
    with pytest.raises(InsufficientMemoryError, match=r"captured steps did not fit: 1125899906842624 bytes .* turn cuda_graphs off") as told:
        engine(model)
    assert told.value.__cause__ is not None


def test_other_errors_stay_what_they_are(tiny, monkeypatch):
    def fail(*given, **named):
        raise RuntimeError("an illegal memory access was encountered")

    plain = engine(tiny.ours)
    monkeypatch.setattr(plain._runner, "launch", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        plain.warm_up()
