"""The GPU's path over CPU tensors: the same files, with the kernels' plain twins under them and no graphs.

Steps are launched before the last one's tokens are read, exactly as on a GPU. With BATON_ENGINE_DEVICE=cuda:0 the same tests run there, with
Triton and captured steps; those that join two engines through host memory are left out.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
from engine_pair import Pair, legs
from engine_reference import CANCEL, FAMILIES, answers, assert_all_free, ends, engine, make_reference, prompts, request, run

from baton.engine import EngineConfig, FinishReason, Request, SamplingParams, load_model_config, plan_layout
from baton.engine.device.chunk import chunk_of
from baton.engine.device.model import DeviceModel, Rows
from baton.engine.device.products import Mode
from baton.engine.device.prompts import ChunkAttention
from baton.engine.device.runner import batch_sizes
from baton.engine.engine import MAX_WAITS
from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool
from baton.engine.scheduling.sequence import Sequence, Slice, StepPlan
from baton.engine.step_time import PARTS
from baton.engine.types import Extent, Failed, PrefillStarted, Token
from baton.engine.weights import WeightReader

DEVICE = torch.device(os.environ.get("BATON_ENGINE_DEVICE", "cpu"))
through_host_memory = pytest.mark.skipif(DEVICE.type != "cpu", reason="the link between the two engines is host memory")
LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64, 65, 100]


def on_device(folder, dtype: torch.dtype = torch.float32) -> DeviceModel:
    with torch.inference_mode(), WeightReader(folder, dtype) as reader:
        return DeviceModel(load_model_config(folder), reader, dtype, DEVICE)


@pytest.fixture(autouse=True)
def plain_twins(monkeypatch):
    """Not Triton's interpreter, which libs/conftest.py turns on for the kernels' own tests."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="module")
def model(tiny):
    return on_device(tiny.folder)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("page_size", "budget", "captured"), [(4, 64, True), (16, 512, True), (16, 512, False), (16, 9, False), (1, 33, True)])
def test_greedy_is_transformers(tiny, model, page_size, budget, captured, deterministic):
    asked = dict(enumerate(prompts(LENGTHS), start=1))
    expected = {room: tiny.greedy(prompt, 24) for room, prompt in asked.items()}
    plain = engine(
        model,
        num_pages=1600 // page_size,
        page_size=page_size,
        max_num_batched_tokens=budget,
        max_running=8,
        deterministic=deterministic,
        cuda_graphs=captured,
    )
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=24))
    events = run(plain)
    assert answers(events) == expected
    assert all(end.reason is FinishReason.LENGTH and end.completion_tokens == 24 for end in ends(events).values())
    assert_all_free(plain)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("page_size", "budget", "captured"), [(4, 64, True), (16, 512, False), (16, 9, True), (1, 33, True)])
def test_a_prefix_that_is_there_changes_nothing(tiny, model, page_size, budget, captured, deterministic):
    """Chunks that begin behind it, captured or not, down to one token, which is a step like those of answers; and pages that answers left."""
    shared, *tails = prompts([40, 1, 7, 16, 33])
    asked = dict(enumerate([shared + tail for tail in tails], start=1))
    expected = {room: tiny.greedy(prompt, 12) for room, prompt in asked.items()}
    settings = {"deterministic": deterministic, "cuda_graphs": captured, "prefix_cache": True, "max_num_batched_tokens": budget}
    plain = engine(model, num_pages=1600 // page_size, page_size=page_size, max_running=8, **settings)
    for again in (0, 10):
        for room, prompt in asked.items():
            plain.add(request(again + room, prompt, max_tokens=12))
        assert answers(run(plain)) == {again + room: tokens for room, tokens in expected.items()}
    plain.add(request(99, asked[4] + expected[4], max_tokens=6))
    assert answers(run(plain))[99] == tiny.greedy(asked[4] + expected[4], 6)
    found = plain.stats().extra["prefix_found_tokens"]
    assert found >= sum(len(prompt) - 1 - page_size for prompt in asked.values()) + 73
    assert_all_free(plain)


def test_a_sliding_window_ends_within_a_prefix_that_is_there(tmp_path):
    reference = make_reference(tmp_path, "mistral", **EXTRA["mistral"])
    (prompt,) = prompts([50])
    for model in (reference.ours, on_device(tmp_path)):
        plain = engine(model, prefix_cache=True)
        for room, length in ((1, 30), (2, 50), (3, 50)):
            plain.add(request(room, prompt[:length], max_tokens=12))
            assert answers(run(plain))[room] == reference.greedy(prompt[:length], 12)
        assert plain.stats().extra["prefix_found_tokens"] == 28 + 48
        assert_all_free(plain)


EXTRA = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2},
    "mixtral": {"num_local_experts": 4},
    "mistral": {"sliding_window": 20},
}


@torch.inference_mode()
def logits(model: DeviceModel, tokens: list[int], mode: Mode) -> torch.Tensor:
    """[tokens, vocabulary] float32 of one fresh prompt, on the CPU."""
    layout = plan_layout(model.config, EngineConfig(num_pages=64, page_size=4, dtype=str(model.dtype).removeprefix("torch.")))
    pool = KVPool(layout, model.dtype, device=DEVICE)
    pool.planes.fill_(float("nan"))
    pages = PageTable()
    pages.append(Extent(3, pool.layout.pages_for(len(tokens))))
    piece = Slice(Sequence(Request(1, tokens, SamplingParams()), tokens, pages=pages), 0, len(tokens), samples=True)
    slots = [slot for first, count in pages.runs(0, len(tokens), pool.layout.page_size) for slot in range(first, first + count)]
    rows = Rows(*(torch.tensor(each, device=DEVICE) for each in (tokens, range(len(tokens)), slots)), sampled=None)
    found = model.forward(rows, pool, ChunkAttention(chunk_of([piece], layout.page_size), mode is Mode.INVARIANT, DEVICE), mode)
    assert found is not None
    return found.float().cpu()


@pytest.mark.parametrize("mode", [Mode.MANY, Mode.INVARIANT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_families(tmp_path, family, dtype, mode):
    """Of each token's logits the relative root mean square error. float32: rounding only, on every token. bfloat16: as near to transformers'
    float32 as its own bfloat16 is, within a quarter: what is left is rounding to 8 bits at other places. That holds for nearly all tokens of a
    dense model, and for its worst one within a factor of two; with experts only in the middle, because where two are a near tie rounding may send
    a token to another one, and all later tokens of its prompt see it."""
    reference = make_reference(tmp_path, family, **EXTRA.get(family, {}))
    asked = prompts([45] * (1 if dtype is torch.float32 else 8), seed=3)
    exact = [reference.logits(tokens) for tokens in asked]

    def errors(found: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(found, exact, strict=True)
        return torch.cat([(got - want).square().mean(dim=1) / want.square().mean(dim=1) for got, want in pairs]).sqrt()

    model = on_device(tmp_path, dtype)
    ours = errors([logits(model, tokens, mode) for tokens in asked])
    if dtype is torch.float32:
        assert ours.median() <= 1e-5
        assert ours.max() <= 2e-5
        return
    reference.theirs.to(dtype)
    theirs = errors([reference.logits(tokens) for tokens in asked])
    assert ours.median() <= 1.25 * theirs.median()
    if model.config.moe is None:
        assert ours.quantile(0.95) <= 1.25 * theirs.quantile(0.95)
        assert ours.max() <= 2 * theirs.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family):
    reference = make_reference(tmp_path, family, **EXTRA.get(family, {}))
    asked = dict(enumerate(prompts([1, 7, 30, 50], seed=2), start=1))
    plain = engine(on_device(tmp_path), max_num_batched_tokens=40)
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=12))
    assert answers(run(plain)) == {room: reference.greedy(prompt, 12) for room, prompt in asked.items()}
    assert_all_free(plain)


@through_host_memory
def test_split_is_plain_and_samples_what_the_cpu_samples(tiny, model):
    asked = dict(enumerate(prompts([9, 30, 50, 3], seed=3), start=1))
    cpu, pair = engine(tiny.ours), Pair(model)
    for room, prompt in asked.items():
        settings = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": (1 << 63) + room, "min_tokens": 5}
        cpu.add(request(room, prompt, max_tokens=25, stop_token_ids=frozenset({room, 7, 90}), **settings))
        pair.add(request(room, prompt, max_tokens=25, stop_token_ids=frozenset({room, 7, 90}), **settings))
    assert legs(pair.run()) == answers(run(cpu))
    pair.assert_clean()


def test_a_top_k_of_more_than_an_int32_is_off(tiny, model):
    """Workers take what 32 bits hold; whoever speaks with one directly must not end its engine."""
    asked = dict(enumerate(prompts([9, 30], seed=3), start=1))
    found = []
    for of in (tiny.ours, model):
        plain = engine(of)
        for room, prompt in asked.items():
            plain.add(request(room, prompt, max_tokens=6, temperature=1.0, top_k=2**32 - room, seed=room))
        found.append(answers(run(plain)))
    assert found[0] == found[1]


@through_host_memory
def test_a_stop_token_ends_the_answer_although_the_next_step_runs(tiny, model):
    prompt = prompts([20], seed=4)[0]
    whole = tiny.greedy(prompt, 30)
    stop = whole[10]
    expected = whole[: whole.index(stop) + 1]
    pair = Pair(model)
    pair.add(request(1, prompt, max_tokens=30, stop_token_ids=frozenset({stop})))
    events = pair.run()
    assert legs(events) == {1: expected}
    assert ends(events)[1].reason is FinishReason.STOP
    pair.assert_clean()


@through_host_memory
def test_retraction_and_more_sequences_than_a_step_takes(tiny, model):
    asked = dict(enumerate(prompts([20, 21, 22, 23, 5, 6], seed=4), start=1))
    expected = {room: tiny.greedy(prompt, 40) for room, prompt in asked.items()}
    pair = Pair(model, decode_pages=36, growth_tokens=2, max_running=2)
    pair.add(*(request(room, prompt, max_tokens=40) for room, prompt in asked.items()))
    assert legs(pair.run()) == expected
    assert pair.decode.stats().extra["retractions"] >= 1
    pair.assert_clean()


@through_host_memory
@pytest.mark.parametrize("steps", range(1, 12))
def test_an_abort_while_a_step_is_unread(tiny, model, steps):
    asked = dict(enumerate(prompts([20, 9], seed=6), start=1))
    pair = Pair(model)
    pair.add(*(request(room, prompt, max_tokens=20) for room, prompt in asked.items()))
    events = []
    for _ in range(steps):
        events += pair.prefill.step() + pair.decode.step()
    for each in (pair.prefill, pair.decode):
        each.abort(1, CANCEL)
    events += pair.run()
    assert legs(events)[2] == tiny.greedy(asked[2], 20)
    assert any(isinstance(event, Failed) and event.room == 1 for event in events)
    pair.assert_clean()


def test_not_finite_logits_end_the_room_and_only_that(tmp_path):
    reference = make_reference(tmp_path, "llama", tie_word_embeddings=False)
    broken = on_device(tmp_path)
    with torch.inference_mode():
        broken._embedding[5].fill_(float("nan"))
    good = prompts([12], seed=1)[0]
    good = [token if token != 5 else 6 for token in good]
    plain = engine(broken)
    plain.add(request(1, [1, 2, 5, 3], max_tokens=8))
    plain.add(request(2, good, max_tokens=8))
    events = run(plain)
    assert ends(events)[1].failure.cause == "logits_not_finite"
    expected = reference.greedy(good, 8)
    assert answers(events)[2] == expected[: expected.index(5) + 1] if 5 in expected else expected
    assert_all_free(plain)


@pytest.mark.parametrize("side", ["cpu", "device"])
def test_warming_up_leaves_nothing(tiny, model, side):
    prompt = prompts([20], seed=4)[0]
    plain = engine(tiny.ours if side == "cpu" else model, max_num_batched_tokens=64)
    plain.warm_up()
    assert plain.step() == []
    assert not plain.has_work()
    assert_all_free(plain)
    plain.add(request(1, prompt, max_tokens=8))
    assert answers(run(plain)) == {1: tiny.greedy(prompt, 8)}
    with pytest.raises(RuntimeError, match="before the first"):
        plain.warm_up()


def test_batch_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(100)[-3:] == [80, 96, 100]


def test_where_the_hosts_part_of_steps_goes_is_told(model):
    plain, told = engine(model), []
    plain.add(request(1, prompts([9])[0], max_tokens=1))
    run(plain)  # whoever does not listen pays for no list
    plain.step_time.on_step(lambda spent, idle_s: told.append((dict(zip(PARTS, spent, strict=True)), idle_s)))
    begun, before = time.perf_counter(), plain.stats().steps
    for room in (2, 3):
        plain.add(request(room, prompts([9])[0], max_tokens=20))
    run(plain)
    took = time.perf_counter() - begun
    assert len(told) == plain.stats().steps - before
    parts = {part: sum(spent[part] for spent, _ in told) for part in PARTS}
    assert 0 < sum(parts.values()) < took
    assert min(parts[part] for part in ("admit", "schedule", "launch", "commit")) > 0
    assert parts["deliver"] == 0  # the host's, which is not here
    if DEVICE.type == "cuda":
        # Steps of a model this small have run before the next is launched: the device stands still, and that is told as well.
        assert sum(idle_s is not None and 0 <= idle_s < took for _, idle_s in told) >= 15
    else:
        assert {idle_s for _, idle_s in told} == {None}


def test_tokens_are_told_behind_the_launch_that_follows_and_all_else_at_once(tiny, model):
    plain, said = engine(model), []
    launch = plain._runner.launch
    plain._runner.launch = lambda plan, *others: (said.append(plan), launch(plan, *others))[1]
    plain.on_milestones(said.append)
    asked = {room: prompts([9], seed=room)[0] for room in (1, 2)}
    plain.add(request(1, asked[1], max_tokens=40))
    while plain.has_work():
        said.append(plain.step())
        if sum(isinstance(each, StepPlan) for each in said) == 6 and plain.stats().rooms == 1:
            plain.add(request(2, asked[2], max_tokens=8))
    told = [each for each in said if each and not isinstance(each, StepPlan)]
    assert answers([event for events in told for event in events]) == {1: tiny.greedy(asked[1], 40), 2: tiny.greedy(asked[2], 8)}
    steps = [place for place, each in enumerate(said) if isinstance(each, StepPlan) and each.decodes_only]
    behind = [said[place + 1] for place in steps]
    assert sum(bool(events) and all(isinstance(event, Token) for event in events) for events in behind) >= 10
    prompt = next(place for place, each in enumerate(said) if isinstance(each, StepPlan) and not each.decodes_only and len(each.slices) > 1)
    assert any(isinstance(event, PrefillStarted) and event.room == 2 for event in said[prompt - 1])


class Slow:
    """A flight that has run at the `num_looks`-th look."""

    def __init__(self, flight, num_looks: int) -> None:
        self._flight, self._num_looks, self.looks = flight, num_looks, 0

    def __getattr__(self, name):
        return getattr(self._flight, name)

    def wait(self, timeout_s: float) -> bool:
        self.looks += 1
        return self.looks >= self._num_looks


def test_a_step_waits_on_until_it_has_run_or_somebody_is_woken(model):
    plain, flights = engine(model), []
    launch = plain._runner.launch
    plain._runner.launch = lambda *given: flights.append(Slow(launch(*given), 2 * MAX_WAITS + 5)) or flights[-1]
    plain.add(request(1, prompts([9])[0], max_tokens=1))

    def looks() -> int:
        before = flights[0].looks if flights else 0
        plain.step()
        return flights[0].looks - before

    plain.step()
    assert looks() == 1  # nobody says when there is something else to do
    woken = [False]
    plain.on_wait(lambda: woken[0])
    assert looks() == MAX_WAITS
    woken[0] = True
    assert looks() == 1
    woken[0] = False
    assert looks() == MAX_WAITS
    assert len(flights) == 1
    assert plain.stats().steps == 0
    run(plain)
    assert plain.stats().steps == 1


def test_what_is_known_is_told_before_a_step_waits(model):
    plain, flights, told = engine(model), [], []
    launch = plain._runner.launch
    plain._runner.launch = lambda *given: flights.append(Slow(launch(*given), 2 * MAX_WAITS)) or flights[-1]
    plain.on_milestones(lambda events: told.append((flights[0].looks if flights else 0, events)))
    plain.on_wait(lambda: False)
    for room, prompt in enumerate(prompts([9, 5]), start=1):
        plain.add(request(room, prompt, max_tokens=1))
    plain.step()
    told.clear()
    plain.abort(1, CANCEL)
    assert plain.step() == []
    assert told == [(0, [Failed(1, CANCEL)])]
    assert flights[0].looks == MAX_WAITS
    run(plain)


def test_rows_are_looked_up_again_when_a_seat_has_changed(model):
    runner = engine(model)._runner
    seats, sequence = runner._seats, Sequence(request(1, [1, 2, 3]), [1, 2, 3, 4], num_computed=3)
    rows = runner._seated(seats, [sequence.next_token()])
    assert runner._seated(seats, [sequence.next_token()]) is rows
    runner.release(sequence)
    assert sequence not in seats
    assert runner._seated(seats, [sequence.next_token()]) is not rows
    assert sequence in seats
