"""A forward pass that nobody wants any more leaves between two layers, on every kind of runner; nothing of it stays behind."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_reference import CANCEL, answers, assert_all_free, ends, engine, make_reference, prompts, request, run
from test_engine_split import Pair, legs

from baton.engine import Engine, EngineConfig, KVPool, Role, load_model, load_model_config, plan_layout
from baton.engine.device.model import DeviceModel
from baton.engine.device.runner import DeviceRunner
from baton.engine.given_up import GivenUp
from baton.engine.page_table import PageTable
from baton.engine.parallel.model import ShardedModel
from baton.engine.parallel.pool import ShardedPool
from baton.engine.parallel.runner import ShardedRunner
from baton.engine.runner import CpuRunner
from baton.engine.scheduling.sequence import Sequence, Slice, StepPlan
from baton.engine.types import Extent, Failed, Failure, Finished, Transferred
from baton.engine.weights import WeightReader

CPU = torch.device("cpu")
TIMEOUT = Failure("DEADLINE_EXCEEDED", "prefill", "deadline", "too late")
NUM_LAYERS = 3


@pytest.fixture(autouse=True)
def plain_twins(monkeypatch):
    """Not Triton's interpreter, which libs/conftest.py turns on for the kernels' own tests."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    """As `tiny`, of heads and words that two ranks can share."""
    return make_reference(tmp_path_factory.mktemp("given_up"), "llama", tie_word_embeddings=True, vocab_size=132)


def device_model(folder, group=None) -> DeviceModel:
    with torch.inference_mode(), WeightReader(folder, torch.float32) as reader:
        return DeviceModel(load_model_config(folder), reader, torch.float32, CPU, group)


@pytest.fixture(params=["cpu", "device", "cpu ranks", "device ranks"])
def model(request, even):
    """Of each kind of runner."""
    if request.param == "cpu":
        yield even.ours
    elif request.param == "device":
        yield device_model(even.folder)
    else:
        if request.param == "cpu ranks":
            sharded = load_model(even.folder, tensor_parallel=2)
        else:
            load = lambda rank, group, device: device_model(even.folder, group)  # noqa: E731
            sharded = ShardedModel(load_model_config(even.folder), torch.float32, (CPU, CPU), load, deterministic=False)
        yield sharded
        sharded.close()


# --- the decision ------------------------------------------------------------------------------------------------------------------


def test_only_when_all_rooms_are_being_ended():
    ending: dict[int, Failure] = {3: CANCEL}
    given_up = GivenUp([1, 2], ending)
    assert not given_up(0)
    ending[1] = CANCEL
    assert not given_up(1)
    ending[2] = TIMEOUT
    assert given_up(2)
    assert given_up.at == 2


def test_who_asks_first_decides_for_all_ranks():
    ending: dict[int, Failure] = {}
    given_up = GivenUp([1], ending)
    assert [given_up(layer) for layer in (0, 1, 2)] == [False] * 3  # the rank in front
    ending[1] = CANCEL
    assert [given_up(layer) for layer in (0, 1, 2)] == [False] * 3  # one that comes after it
    assert given_up(3)
    ending.clear()
    assert given_up(3)
    assert not given_up(2)


def test_ranks_that_race_leave_before_the_same_layer():
    for _ in range(50):
        ending: dict[int, Failure] = {}
        given_up, left = GivenUp([1], ending), []

        def rank(given_up=given_up, left=left):
            left.append(next((layer for layer in range(2000) if given_up(layer)), None))

        threads = [threading.Thread(target=rank) for _ in range(4)]
        for thread in threads:
            thread.start()
        ending[1] = CANCEL
        for thread in threads:
            thread.join()
        assert left == [given_up.at] * 4


# --- runners -----------------------------------------------------------------------------------------------------------------------


def runner_of(model):
    """The runner of a prefill server, and the pool's planes that it writes, poisoned with NaN."""
    layout = plan_layout(model.config, EngineConfig(num_pages=16, page_size=4, dtype="float32"))
    if isinstance(model, ShardedModel):
        pool = ShardedPool.make(layout, model.dtype, model.devices)
        for part in pool.parts:
            part.planes.fill_(float("nan"))
        runner = ShardedRunner(model.ranks, lambda rank: single(model.shards[rank], pool.parts[rank]))
        model.on_close(runner.close)
        return runner, [part.planes for part in pool.parts]
    pool = KVPool(layout, model.dtype, device=CPU)
    pool.planes.fill_(float("nan"))
    return single(model, pool), [pool.planes]


def single(model, pool):
    if isinstance(model, DeviceModel):
        return DeviceRunner(model, pool, Role.PREFILL, 4, 16, 64, deterministic=False, capture=True)
    return CpuRunner(model, pool)


class Ending(dict):
    """A room that is given up while layer `before` - 1 is computed: `GivenUp` looks once for each layer."""

    def __init__(self, before: int) -> None:
        self._left = before

    def __contains__(self, room: object) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_pass_leaves_before_the_next_layer(model, before):
    runner, planes = runner_of(model)
    tokens = prompts([20])[0]
    pages = PageTable()
    pages.append(Extent(0, 5))
    piece = Slice(Sequence(request(1, tokens), tokens, pages=pages), 0, len(tokens), samples=True)
    given_up, done = GivenUp([1], Ending(before)), []
    flight = runner.launch(StepPlan((piece,)), lambda layer, ready: done.append(layer), given_up)
    assert flight.wait(1)
    assert given_up.at == before
    assert done == list(range(before)), "every layer before it was handed over, none after"
    for plane in planes:
        assert [bool(plane[layer].isfinite().any()) for layer in range(NUM_LAYERS)] == [layer < before for layer in range(NUM_LAYERS)]
    runner.launch(StepPlan((piece,)), None, GivenUp([1], {}))
    assert all(plane.flatten(1)[layer].isfinite().any() for plane in planes for layer in range(NUM_LAYERS)), "the next pass runs on all ranks"


# --- engines -----------------------------------------------------------------------------------------------------------------------


class During:
    """Calls something in the middle of a prefill engine's pass: when layer `layer` of a pass is handed over, once."""

    def __init__(self, link, layer, call):
        self.layers = []
        inner, self._call = link.exporter.layer_done, call

        def layer_done(at, ranges, ready=None):
            inner(at, ranges, ready)
            self.layers.append(at)
            if at == layer and self._call is not None:
                call, self._call = self._call, None
                call()

        link.exporter.layer_done = layer_done


def start_both(pair: Pair, *requests) -> None:
    """Until decode has published the rooms: what comes next is a pass of prefill."""
    pair.add(*requests)
    pair.decode.step()
    pair.prefill._scheduler.poll()


@pytest.mark.parametrize("budget", [64, 16])
def test_prefill_leaves_a_pass_of_rooms_that_are_gone(tiny, budget):
    """In the last chunk of a prompt, which draws its token, and in one before."""
    pair = Pair(tiny.ours, max_num_batched_tokens=budget)
    first, second = prompts([24, 33])
    during = During(pair.link, 0, lambda: pair.prefill.give_up(1, CANCEL))
    start_both(pair, request(1, first, max_tokens=4))
    events = pair.prefill.step()
    assert during.layers == [0], "layers of an abandoned pass were computed"
    assert [event for event in events if isinstance(event, Failed)] == [Failed(1, CANCEL)]
    assert pair.prefill.stats().extra["computed_tokens"] == 0
    pair.prefill.step()
    assert_all_free(pair.prefill)
    pair.prefill.abort(1, CANCEL)  # the command that comes behind
    assert not pair.prefill._ending
    pair.run()
    pair.assert_clean()
    pair.add(request(2, second, max_tokens=6))
    assert legs(pair.run()) == {2: tiny.greedy(second, 6)}
    pair.assert_clean()


def test_prefill_goes_on_when_only_some_rooms_are_gone(tiny):
    pair = Pair(tiny.ours)
    stays, goes = prompts([24, 20])
    during = During(pair.link, 0, lambda: pair.prefill.give_up(2, CANCEL))
    start_both(pair, request(1, stays, max_tokens=5), request(2, goes, max_tokens=5))
    events = pair.prefill.step()
    assert during.layers == [0, 1, 2]
    assert not [event for event in events if isinstance(event, Failed)], "it is ended by its abort, not before"
    pair.prefill.abort(2, CANCEL)
    events += pair.run()
    told = [event for event in events if event.room == 2 and isinstance(event, (Failed, Finished, Transferred))]
    assert Failed(2, CANCEL) in told
    assert legs(event for event in events if event.room == 1) == {1: tiny.greedy(stays, 5)}
    pair.assert_clean()


def test_rooms_that_go_one_after_the_other_in_one_pass(tiny):
    pair = Pair(tiny.ours)
    during = During(pair.link, 1, lambda: [pair.prefill.give_up(1, CANCEL), pair.prefill.give_up(2, TIMEOUT)])
    start_both(pair, *(request(room, prompt, max_tokens=5) for room, prompt in enumerate(prompts([24, 20]), start=1)))
    failed = [event for event in pair.prefill.step() if isinstance(event, Failed)]
    assert during.layers == [0, 1]
    assert failed == [Failed(1, CANCEL), Failed(2, TIMEOUT)]
    pair.run()
    pair.assert_clean()


def give_up_in_first_layer(worker: Engine, room: int) -> list[int]:
    """Gives the room up from another thread while the worker's next pass writes its first layer; the layers that were written."""
    written: list[int] = []
    write = worker._runner._pool.write

    def writes(layer, *rest):
        written.append(layer)
        write(layer, *rest)
        if len(written) == 1:
            thread = threading.Thread(target=worker.give_up, args=(room, CANCEL))
            thread.start()
            thread.join()

    worker._runner._pool.write = writes
    return written


@pytest.mark.parametrize("role", [Role.PLAIN, Role.DECODE])
def test_a_prompt_that_is_computed_beside_answers(tiny, role):
    """A plain server's, and a decode server's own."""
    local = {"local": True} if role is Role.DECODE else {}
    worker = Pair(tiny.ours).decode if role is Role.DECODE else engine(tiny.ours)
    first, second = prompts([40, 30])
    written = give_up_in_first_layer(worker, 1)
    worker.add(request(1, first, **local))
    events = worker.step()
    assert written == [0]
    assert [event for event in events if isinstance(event, Failed)] == [Failed(1, CANCEL)]
    assert_all_free(worker)
    worker.abort(1, CANCEL)
    worker.add(request(2, second, max_tokens=7, **local))
    events = run(worker)
    assert answers(events) == {2: tiny.greedy(second, 7)}
    assert isinstance(ends(events)[2], Finished)
    assert_all_free(worker)


def test_with_a_step_still_unread(even):
    """On a device the next step is launched before the last one is read: the pass that leaves may be the second in flight."""
    model = device_model(even.folder)
    worker = engine(model)
    first, second = prompts([100, 30])
    worker.add(request(1, first, max_tokens=5))
    worker.step()  # the first chunk is launched
    inner = model.forward

    def forward(rows, pool, attention, mode, layer_done=None, given_up=None):
        model.forward = inner
        worker.give_up(1, CANCEL)
        return inner(rows, pool, attention, mode, layer_done, given_up)

    model.forward = forward
    events = worker.step()
    assert Failed(1, CANCEL) in events
    worker.abort(1, CANCEL)
    run(worker)
    assert_all_free(worker)
    assert len(worker._runner._seats) == 0
    worker.add(request(2, second, max_tokens=6))
    assert answers(run(worker)) == {2: even.greedy(second, 6)}
    assert_all_free(worker)
