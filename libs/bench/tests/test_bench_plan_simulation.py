"""The simulator against what must hold of any queue, and against closed formulas of queueing theory."""

import dataclasses

import numpy as np
import pytest
from bench_planned import CPU, GPU, chat, poisson
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.errors import SettingError
from baton.bench.measures import Objectives
from baton.bench.plan import ClosedLoad, Costs, FleetShape, OpenLoad, PathCosts, ServerLimits, StepCosts, simulate
from baton.bench.plan.costs import Neighbours
from baton.bench.plan.outcome import weighted_percentiles

SHAPES = st.sampled_from(
    [
        FleetShape(num_plain=1),
        FleetShape(num_plain=3, routing="round-robin"),
        FleetShape(num_prefill=1, num_decode=1),
        FleetShape(num_prefill=2, num_decode=3, num_per_host=2),
    ]
)
LENGTHS = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=40)
SERVICE_S = 0.01
#: One prompt at a time, a token each: a queue with a single server whose service time is that of the prompt.
QUEUE = Costs(StepCosts(0.0, SERVICE_S / 1000, 0.0, 0.0, 0.0, 0.0))
ONE_AT_A_TIME = FleetShape(num_plain=1, limits=ServerLimits(max_batched_tokens=100_000, max_running=1))


@settings(max_examples=60)
@given(SHAPES, LENGTHS, st.sampled_from([30, 200]), st.floats(1, 500), st.booleans())
def test_every_request_ends_once_and_every_page_comes_back(
    shape: FleetShape, lengths: list[tuple[int, int]], num_pages: int, rate: float, is_closed: bool
) -> None:
    limits = ServerLimits(8, num_pages, max_batched_tokens=32, max_running=8, growth_tokens=8)
    load = ClosedLoad(tuple((prompt, answer, False) for prompt, answer in lengths), 4) if is_closed else poisson(rate, lengths)
    outcome = simulate(CPU, dataclasses.replace(shape, limits=limits), load, 1)
    assert [job.index for job in outcome.jobs] == list(range(len(lengths)))
    for job, (_, answer) in zip(outcome.jobs, lengths, strict=True):
        assert len(job.gaps_s()) == answer - 1
        assert (job.gaps_s() >= 0).all()
        assert job.arrived_s < job.first_s <= job.ended_s <= outcome.ended_s
    assert all((rows.free, rows.num, rows.context) == (num_pages, 0, 0) for rows in outcome.rows)
    weights = sum(sum(rows.rows_in_both[1:]) + len(rows.loose) for rows in outcome.rows)
    assert weights == sum(answer - 1 for _, answer in lengths), "the pooled gaps are those of the streams"


@given(st.lists(st.tuples(st.floats(0.001, 1), st.integers(0, 5)), min_size=1, max_size=30), st.floats(0, 100))
def test_weighted_percentiles_are_those_of_the_whole_list(pairs: list[tuple[float, int]], percent: float) -> None:
    values, weights = np.asarray([value for value, _ in pairs]), np.asarray([float(weight) for _, weight in pairs])
    found = weighted_percentiles(values, weights, (percent,))
    if weights.sum():
        assert found[0] == pytest.approx(np.percentile(np.repeat(values, weights.astype(int)), percent))
    else:
        assert np.isnan(found[0])


def test_the_seed_decides_everything() -> None:
    load = poisson(20, chat(300))
    for shape in (FleetShape(num_plain=2), FleetShape(num_prefill=1, num_decode=1)):
        one, same, other = (simulate(GPU, shape, load, seed).figures() for seed in (1, 1, 2))
        assert one == same
        assert one != other


@pytest.mark.parametrize("use", [0.3, 0.6, 0.8])
def test_constant_service_is_the_m_d_1_queue(use: float) -> None:
    load = poisson(use / SERVICE_S, [(1000, 1)] * 60_000, seed=5)
    waits_s = [job.first_s - job.arrived_s - SERVICE_S for job in simulate(QUEUE, ONE_AT_A_TIME, load, 0).jobs]
    assert np.mean(waits_s) == pytest.approx(use * SERVICE_S / (2 * (1 - use)), rel=0.08)


@pytest.mark.parametrize("use", [0.3, 0.6, 0.8])
def test_exponential_service_is_the_m_m_1_queue(use: float) -> None:
    prompts = np.maximum(1, np.random.default_rng(6).exponential(1000, 60_000).round()).astype(int)
    load = poisson(use / SERVICE_S, [(int(prompt), 1) for prompt in prompts], seed=7)
    times_s = np.asarray([job.first_s - job.arrived_s for job in simulate(QUEUE, ONE_AT_A_TIME, load, 0).jobs])
    mean_s = SERVICE_S / (1 - use)
    assert times_s.mean() == pytest.approx(mean_s, rel=0.1)
    assert np.percentile(times_s, 90) == pytest.approx(mean_s * np.log(10), rel=0.12), "its time in the system is exponential too"


def test_more_load_is_slower_and_more_servers_are_faster() -> None:
    def late(shape: FleetShape, rate: float) -> tuple[float, float]:
        found = simulate(GPU, shape, poisson(rate, chat(1500)), 1).figures()
        return found.ttft_p99_ms, found.itl_p99_ms

    for shape, more in (
        (FleetShape(num_plain=2), FleetShape(num_plain=4)),
        (FleetShape(num_prefill=1, num_decode=1), FleetShape(num_prefill=2, num_decode=2)),
    ):
        calm, busy, relieved = late(shape, 5), late(shape, 30), late(more, 30)
        assert all(a < 1.05 * b for a, b in zip(calm, busy, strict=True)), shape.name
        assert all(a < 1.05 * b for a, b in zip(relieved, busy, strict=True)), shape.name
        assert calm[0] < busy[0]


def test_a_long_prompt_pauses_the_streams_of_a_plain_server_and_not_those_of_a_split() -> None:
    load = OpenLoad(((0.0, 50, 400, False), (0.5, 3000, 4, True)))
    plain, split = (
        simulate(GPU, shape, load, 0).jobs[0].gaps_s().max() for shape in (FleetShape(num_plain=1), FleetShape(num_prefill=1, num_decode=1))
    )
    assert plain > 3 * split


def test_a_mixed_limit_makes_the_pause_shorter() -> None:
    load = OpenLoad(((0.0, 50, 400, False), (0.5, 3000, 4, True)))
    pauses = [
        simulate(GPU, FleetShape(num_plain=1, limits=ServerLimits(mixed_prompt_tokens=mixed)), load, 0).jobs[0].gaps_s().max()
        for mixed in (None, 128)
    ]
    assert pauses[0] > 2 * pauses[1]


def test_a_transfer_moves_beside_the_computing_and_only_its_tail_is_exposed() -> None:
    path = PathCosts(kv_bytes_per_token=1e6, bandwidth=1e9, tail_share=0.1, handoff_s=0.002, bootstrap_s=0.0)
    steps = StepCosts(0.0, 0.0005, 0.0, 0.01, 0.0, 0.0)
    shape = FleetShape(num_prefill=1, num_decode=1)
    fast = dataclasses.replace(path, bandwidth=1e10)
    for link, exposed_s in ((path, 0.05 + 0.002), (fast, 0.1 * 0.01 + 0.002)):
        # 100 tokens: computed in 50 ms; 1e8 bytes: 100 ms over the slow link, 10 ms over the fast one, whose last tenth waits for the last layer.
        (job,) = simulate(Costs(steps, path=link), shape, OpenLoad(((0.0, 100, 3, False),)), 0).jobs
        assert job.first_s == pytest.approx(0.05)
        assert job.landed_s - job.first_s == pytest.approx(exposed_s)
        assert job.gaps_s().tolist() == pytest.approx([exposed_s + 0.01, 0.01])


def test_transfers_into_one_server_share_its_link() -> None:
    path = PathCosts(1e6, 1e9, 0.0, 0.0, 0.0)
    load = OpenLoad(((0.0, 100, 2, False), (1e-9, 100, 2, False)))
    costs = Costs(StepCosts(0.0, 1e-6, 0.0, 0.001, 0.0, 0.0), path=path)
    into_one = simulate(costs, FleetShape(num_prefill=2, num_decode=1), load, 0)
    apart = simulate(costs, FleetShape(num_prefill=2, num_decode=2), load, 0)
    # Decode sees the second at the end of the step that the first is in, of a millisecond.
    assert max(job.landed_s for job in into_one.jobs) == pytest.approx(0.2, abs=0.0011)
    assert max(job.landed_s for job in apart.jobs) == pytest.approx(0.1, abs=0.0011)


def test_neighbours_on_a_host_slow_each_other_only_while_both_are_busy() -> None:
    costs = Costs(StepCosts(0.0, 0.001, 0.0, 0.01, 0.0, 0.0), neighbours=Neighbours(prefill=2.0, decode=1.0))
    shape = FleetShape(num_plain=2, num_per_host=2, routing="round-robin")
    load = OpenLoad(((0.0, 100, 1, False), (0.05, 100, 1, False)))
    first, second = simulate(costs, shape, load, 0).jobs
    # 50 ms alone, then at half speed: the first needs 100 ms more; the second did 50 ms of its work meanwhile and has 50 ms left, alone.
    assert (first.first_s, second.first_s) == (pytest.approx(0.15), pytest.approx(0.2))


def test_goodput_counts_both_objectives() -> None:
    outcome = simulate(GPU, FleetShape(num_plain=1), poisson(4, chat(400)), 1)
    for objectives in (Objectives(60, 20), Objectives(1000, 6), Objectives(80, 8)):
        good = 0
        for job in outcome.counted():
            gaps = job.gaps_s()
            is_late = 1000 * (job.first_s - job.arrived_s) > objectives.ttft_ms
            good += not is_late and 1000 * np.percentile(gaps, 99) <= objectives.itl_p99_ms
        assert outcome.figures(objectives).goodput_share == pytest.approx(good / len(outcome.counted()))


@pytest.mark.parametrize(
    ("shape", "load", "costs", "named"),
    [
        ({"num_plain": 1, "num_prefill": 1}, None, GPU, "plain servers alone"),
        ({"num_prefill": 1}, None, GPU, "at least one prefill and one decode"),
        ({"num_plain": 1, "routing": "dice"}, None, GPU, "routing is 'dice'"),
        ({"num_prefill": 1, "num_decode": 1}, OpenLoad(((0.0, 5, 5, False),)), QUEUE, "path is None"),
        ({"num_plain": 1, "limits": ServerLimits(num_pages=2)}, OpenLoad(((0.0, 50, 5, False),)), GPU, "num_pages is 2, but must be at least 4"),
    ],
)
def test_what_cannot_be_simulated_is_named(shape: dict, load: OpenLoad | None, costs: Costs, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        simulate(costs, FleetShape(**shape), load or OpenLoad(((0.0, 1, 1, False),)), 0)
