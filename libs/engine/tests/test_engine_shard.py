"""Tensor parallelism: what ranks hold, what they read, and that two processes over gloo compute what one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_forward import forward_of, prompts
from shard_worker import CHUNKS, EXTENTS

from baton.engine import InvalidSettingError
from baton.engine.inventory import Split, inventory
from baton.engine.shard import ShardedReader, part_of, shard_config
from baton.engine.weights import WeightReader

# 131 words, the other tests' number, divide by nothing.
EVEN = {"vocab_size": 132}
CASES = {
    "llama, biases": ("llama", {**EVEN, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen2, tied, window": ("qwen2", {**EVEN, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-moe, a dense layer": (
        "qwen3_moe",
        {**EVEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "mixtral": ("mixtral", {**EVEN, "num_local_experts": 4}),
}
TOLERANCE = 3e-5
WORKER = Path(__file__).parent / "shard_worker.py"


@pytest.fixture(scope="module")
def references(make_model):
    return {case: make_model(family, **config) for case, (family, config) in CASES.items()}


@pytest.fixture(scope="module")
def ranks(references, tmp_path_factory):
    """What each of two processes got, by folder."""
    scratch = tmp_path_factory.mktemp("ranks")
    folders = [str(reference.folder) for reference in references.values()]
    workers = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), "2", str(scratch / "meeting"), str(scratch / f"{rank}.pt"), *folders])
        for rank in range(2)
    ]
    try:
        assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    return [torch.load(scratch / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_compute_what_one_does(references, ranks, case):
    reference = references[case]
    tokens = prompts([60])[0]
    ends = torch.tensor(CHUNKS).cumsum(0) - 1
    expected = reference.logits(tokens)
    first, second = (rank[str(reference.folder)] for rank in ranks)
    assert torch.equal(first["logits"], second["logits"])
    assert (first["logits"] - expected[ends]).abs().max() / expected.std() < TOLERANCE
    # Pages of the two ranks side by side are the pages of one server: what a transfer between unequal degrees joins and cuts.
    alone, pool = forward_of(reference.ours, reference.ours.config, tokens, EXTENTS, CHUNKS)
    assert (first["logits"] - alone).abs().max() / expected.std() < TOLERANCE
    together = torch.cat([first["planes"], second["planes"]], dim=3)
    torch.testing.assert_close(together, pool.planes, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_a_rank_reads_its_own_share_of_the_bytes(references, ranks):
    for reference in references.values():
        specs = list(inventory(reference.ours.config))
        whole = sum(spec.num_elements for spec in specs) * 4
        shared = sum(spec.num_elements for spec in specs if spec.split in (Split.NONE, Split.FIRST)) * 4
        for rank in ranks:
            assert rank[str(reference.folder)]["num_bytes_read"] == (whole - shared) // 2 + shared


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_ranks_parts_tile_every_tensor(references, case, degree):
    reference = references[case]
    config = reference.ours.config
    own = {spec.name: spec.shape for spec in inventory(shard_config(config, degree))}
    with WeightReader(reference.folder, torch.float32) as reader:
        ranks = [ShardedReader(reader, config, rank, degree) for rank in range(degree)]
        for spec in inventory(config):
            parts = [rank.read(spec.name, own[spec.name]) for rank in ranks]
            whole = reader.read(spec.name, spec.shape)
            if spec.split is Split.NONE:
                assert all(torch.equal(part, whole) for part in parts)
            elif spec.split is Split.FIRST:
                assert torch.equal(sum(parts), whole)
            else:
                assert torch.equal(torch.cat(parts, dim=0 if spec.split is Split.ROWS else -1), whole)


def test_what_does_not_divide_is_refused_with_the_degrees_that_do(references, tiny):
    config = references["mixtral"].ours.config
    with pytest.raises(InvalidSettingError, match=r"tensor_parallel = 4: must divide num_key_value_heads \(2\); this model takes 1, 2$"):
        shard_config(config, 4)
    with pytest.raises(InvalidSettingError, match=r"tensor_parallel = 2: must divide vocab_size \(131\); this model takes 1$"):
        shard_config(tiny.ours.config, 2)
    with pytest.raises(InvalidSettingError, match="at least 1"):
        shard_config(config, 0)
    with pytest.raises(InvalidSettingError, match=r"rank = 2: must be from 0 to 1"):
        ShardedReader(None, config, 2, 2)


def test_heads_of_a_rank_are_whole_and_its_queries_meet_its_own_keys(references):
    config = references["llama, biases"].ours.config
    specs = {spec.name.removeprefix("model.layers.0.self_attn."): spec for spec in inventory(config)}
    group = config.num_heads // config.num_kv_heads
    for rank in range(2):
        keys, queries = (part_of(specs[name], rank, 2) for name in ("k_proj.weight", "q_proj.weight"))
        assert (keys.start % config.head_dim, queries.start % config.head_dim) == (0, 0)
        assert (queries.start, queries.stop) == (keys.start * group, keys.stop * group)
        assert part_of(specs["o_proj.weight"], rank, 2).start == queries.start
