"""Tensor parallelism inside one process: an engine of several ranks answers what an engine of one does, and is lost as a whole."""

from __future__ import annotations

import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from engine_reference import CANCEL, answers, assert_all_free, engine, make_reference, prompts, request, run
from test_engine_split import Pair, legs

from baton.engine import Engine, EngineConfig, InvalidSettingError, KVLayout, KVPool, Role, WeightsError, load_model, load_model_config, prepare
from baton.engine.device.model import DeviceModel
from baton.engine.device.page_hash import DevicePageHash
from baton.engine.errors import RankFailedError, RanksDisagreeError
from baton.engine.models.collective import BackendGroup
from baton.engine.parallel.model import ShardedModel
from baton.engine.parallel.pool import ShardedPool
from baton.engine.parallel.ranks import Ranks
from baton.engine.parallel.runner import ShardedRunner
from baton.engine.runner import Done
from baton.engine.scheduling.sequence import StepPlan
from baton.engine.testing import MemoryLink, Side
from baton.engine.types import Extent
from baton.engine.weights import WeightReader

CPU = torch.device("cpu")
#: 131 words, the other tests' number, divide by nothing; four KV heads and twelve queries divide by 4.
EVEN = {"vocab_size": 132, "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 2}
CASES = {
    "llama, biases": ("llama", {**EVEN, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen3, tied": ("qwen3", {**EVEN, "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {**EVEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]}),
}
SAMPLED = {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "min_tokens": 3}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return {case: make_reference(tmp_path_factory.mktemp("parallel"), family, **config) for case, (family, config) in CASES.items()}


@pytest.fixture
def sharded():
    """sharded(folder, degree): ranks of the CPU's model. sharded(..., device_model=True): of the GPU's, over CPU tensors."""
    made = []

    def make(folder, degree, *, device_model=False, make_group=None, deterministic=False):
        if not device_model and make_group is None:
            made.append(load_model(folder, tensor_parallel=degree))
            return made[-1]
        config = load_model_config(folder)

        def load(rank, group, device):
            with torch.inference_mode(), WeightReader(folder, torch.float32) as reader:
                return DeviceModel(config, reader, torch.float32, device, group)

        made.append(ShardedModel(config, torch.float32, (CPU,) * degree, load, deterministic=deterministic, make_group=make_group))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def no_rank_is_left(monkeypatch):
    """Also: the kernels' plain twins, not Triton's interpreter, which libs/conftest.py turns on for the kernels' own tests."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert left == []


def asked() -> dict[int, list[int]]:
    return dict(enumerate(prompts([1, 7, 30, 50], seed=2), start=1))


def answered(one: Engine, **sampling) -> dict[int, list[int]]:
    for room, prompt in asked().items():
        one.add(request(room, prompt, max_tokens=12, seed=room, **sampling))
    found = answers(run(one))
    assert_all_free(one)
    return found


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_every_degree_answers_what_one_rank_does(references, sharded, case, degree):
    reference = references[case]
    model = sharded(reference.folder, degree)
    expected = {room: reference.greedy(prompt, 12) for room, prompt in asked().items()}
    assert answered(engine(model, max_num_batched_tokens=40)) == expected
    assert answered(engine(model, num_pages=30, growth_tokens=0), **SAMPLED) == answered(engine(reference.ours), **SAMPLED)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_gpus_path_with_a_collective(references, sharded, case, degree):
    """DeviceModel, DeviceRunner, seats and steps launched ahead, over CPU tensors."""
    reference = references[case]
    model = sharded(reference.folder, degree, device_model=True)
    expected = {room: reference.greedy(prompt, 12) for room, prompt in asked().items()}
    assert answered(engine(model, max_num_batched_tokens=40)) == expected
    assert answered(engine(model), **SAMPLED) == answered(engine(reference.ours), **SAMPLED)


@pytest.mark.parametrize("ordered", [False, True])
def test_over_a_backend_of_torch(references, sharded, ordered):
    """gloo here; NCCL has the same face. Two groups at once, without a default group."""
    reference = references["llama, biases"]
    expected = {room: reference.greedy(prompt, 12) for room, prompt in asked().items()}
    for _ in range(2):
        store = dist.HashStore()

        def gloo(rank, store=store):
            return BackendGroup(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), ordered=ordered)

        model = sharded(reference.folder, 2, device_model=True, make_group=gloo)
        assert answered(engine(model)) == expected
    assert not dist.is_initialized()


class RankedPair(Pair):
    """Both engines of the same ranks, each rank's pages moving from its memory to that of the same rank."""

    def __init__(self, model, **settings) -> None:
        shape = engine(model, **settings).layout
        own = shape.of_rank(model.degree)
        self.memories = [[torch.full((own.pool_bytes // 4,), float("nan")) for _ in range(model.degree)] for _ in range(2)]
        views = [[memoryview(memory.numpy()).cast("B") for memory in side] for side in self.memories]
        self.link = RankedLink(*([Side(view, own) for view in side] for side in views))
        pools = [ShardedPool.over(shape, torch.float32, side) for side in views]
        self.prefill = engine(model, Role.PREFILL, exporter=self.link.exporter, pool=pools[0], **settings)
        self.decode = engine(model, Role.DECODE, importer=self.link.importer, pool=pools[1], **settings)


class RankedLink(MemoryLink):
    def __init__(self, sources, targets) -> None:
        super().__init__(sources[0], targets[0])
        self._ranks = list(zip(sources, targets, strict=True))

    def copy(self, *what) -> None:
        for rank in self._ranks:
            self._source, self._target = rank
            super().copy(*what)


@pytest.mark.parametrize("device_model", [False, True], ids=["cpu's path", "gpu's path"])
def test_split_between_sharded_engines(references, sharded, device_model):
    reference = references["qwen3, tied"]
    pair = RankedPair(sharded(reference.folder, 2, device_model=device_model))
    pair.add(*(request(room, prompt, max_tokens=12) for room, prompt in asked().items()))
    events = []
    for _ in range(2):
        events += pair.prefill.step() + pair.decode.step()
    for each in (pair.prefill, pair.decode):
        each.abort(2, CANCEL)
    found = legs(events + pair.run())
    assert {room: found[room] for room in (1, 3, 4)} == {room: reference.greedy(prompt, 12) for room, prompt in asked().items() if room != 2}
    pair.assert_clean()


def test_layers_are_told_of_once_in_order_and_on_the_engines_thread(references, sharded):
    told = []
    pair = RankedPair(sharded(references["qwen3, tied"].folder, 4))
    real = pair.link.exporter.layer_done
    pair.link.exporter.layer_done = lambda layer, ranges, ready: (told.append((layer, ready, threading.current_thread())), real(layer, ranges, ready))
    pair.add(request(1, asked()[3], max_tokens=2))
    pair.run()
    assert told == [(layer, None, threading.current_thread()) for layer in range(2)]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_rank_that_fails_takes_all_others_with_it(references, sharded, bad):
    """The others wait in a collective for what never comes: they are let go, the engine says which rank it was, and serves no more."""
    model = sharded(references["llama, biases"].folder, 4, device_model=True)
    one = engine(model)
    one.add(request(1, asked()[2], max_tokens=12))
    one.step()

    def break_down(*given, **more):
        raise ZeroDivisionError("a rank breaks down")

    model.shards[bad]._layers[1].mlp.add_to = break_down
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank \d of 4: ") as caught:
        run(one)
    assert time.monotonic() - began < 5
    assert caught.value.rank == bad
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(RankFailedError):
        one.step()


def test_an_error_of_who_hears_of_layers_ends_the_ranks_too(references, sharded):
    pair = RankedPair(sharded(references["qwen3, tied"].folder, 2))

    def broken(layer, ranges, ready):
        raise ZeroDivisionError("an exporter breaks down")

    pair.link.exporter.layer_done = broken
    pair.add(request(1, asked()[3], max_tokens=2))
    with pytest.raises(ZeroDivisionError):
        pair.run()


def test_ranks_that_draw_different_tokens_end_the_engine():
    class Runs:
        depth, warm_lengths, launches = 0, (), Counter()

        def __init__(self, drawn):
            self.drawn = drawn

        def launch(self, plan, layer_done, given_up):
            return Done(self.drawn)

    ranks = Ranks((CPU, CPU), lambda: None)
    try:
        assert ShardedRunner(ranks, lambda rank: Runs([5, None])).launch(StepPlan(), None).drawn() == [5, None]
        flight = ShardedRunner(ranks, lambda rank: Runs([5, 6 + rank])).launch(StepPlan(), None)
        assert flight.wait(1)
        with pytest.raises(RankFailedError, match=r"rank 1 drew \[5, 7\] where rank 0 drew \[5, 6\]") as caught:
            flight.drawn()
        assert isinstance(caught.value.__cause__, RanksDisagreeError)
    finally:
        ranks.close()


def test_prepare_refuses_before_it_loads(references, tmp_path):
    folder = references["qwen3, tied"].folder
    config = EngineConfig(num_pages=8)
    with pytest.raises(InvalidSettingError, match=r"tensor_parallel = 3: must divide num_key_value_heads \(4\); this model takes 1, 2, 4$"):
        prepare(folder, config, Role.PLAIN, tensor_parallel=3)
    with pytest.raises(InvalidSettingError, match=r"tensor_parallel = 0: must be at least 1"):
        prepare(folder, config, Role.PLAIN, tensor_parallel=0)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(WeightsError):  # no thread of a rank is left
        prepare(tmp_path, config, Role.PLAIN, tensor_parallel=2)


def test_prepared_ranks_share_one_pools_bytes_and_warm_up(references):
    prepared = prepare(references["qwen3, tied"].folder, EngineConfig(kv_bytes=1 << 16), Role.DECODE, tensor_parallel=4)
    try:
        alone = prepare(references["qwen3, tied"].folder, EngineConfig(kv_bytes=1 << 16), Role.DECODE)
        assert prepared.layout == alone.layout
        assert prepared.rank_layout.pool_bytes * 4 == prepared.layout.pool_bytes
        buffers = [memoryview(bytearray(prepared.rank_layout.pool_bytes + 64)) for _ in range(4)]
        aligned = [buffer[-torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % 64 :] for buffer in buffers]
        one = Engine(Role.PLAIN, prepared.model, prepared.config, pool=prepared.host_pool(aligned))
        one.warm_up()
        assert answered(one) == {room: references["qwen3, tied"].greedy(prompt, 12) for room, prompt in asked().items()}
        with pytest.raises(InvalidSettingError, match="a model of 4 ranks takes a ShardedPool"):
            Engine(Role.PLAIN, prepared.model, prepared.config, buffer=aligned[0])
    finally:
        prepared.close()


@pytest.mark.parametrize("degree", [2, 3])
def test_digests_of_parts_are_those_of_the_same_heads_elsewhere(degree):
    """A source rank's digest of all its heads is a destination's of those heads among its own, wherever the pages are."""
    layout = KVLayout(num_layers=3, num_kv_heads=6, head_dim=8, page_size=4, num_pages=16, itemsize=4)
    whole = KVPool(layout, torch.float32)
    whole.planes.normal_()
    share = 6 // degree
    for rank in range(degree):
        part = KVPool(layout.of_rank(degree), torch.float32)
        heads = whole.planes[..., rank * share : (rank + 1) * share, :].reshape(3, 2, 16, -1)
        part.planes.view(3, 2, 16, -1)[:, :, [9, 3, 4]] = heads[:, :, [1, 2, 7]]
        own = DevicePageHash(part).of([Extent(9, 1), Extent(3, 2)], 1, 2)
        there = [Extent(1, 2), Extent(7, 1)]
        assert own == DevicePageHash(whole).of(there, 1, 2, (rank * share, share))
        assert own == DevicePageHash(part).of([Extent(9, 1), Extent(3, 2)], 1, 2, (0, share))
        assert own != DevicePageHash(whole).of(there, 1, 2, ((rank * share + 1) % (6 - share + 1), share))
