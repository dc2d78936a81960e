"""The simulated plain server against the engine's own scheduler: every token at the same time, also when pages run out."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("baton.engine", reason="the engine is not installed: bench does not need it, its scheduler is what is compared with")

from baton.bench.plan import Costs, FleetShape, OpenLoad, ServerLimits, StepCosts, simulate
from baton.bench.plan.seats import square_of
from baton.engine.allocator import PageAllocator
from baton.engine.scheduling.plain import PlainScheduler
from baton.engine.scheduling.sequence import Limits
from baton.engine.types import Request, SamplingParams, Token

STEPS = StepCosts(0.011, 0.0007, 0.0000013, 0.017, 0.0023, 0.000031, mixed_share=0.6)


def engine_times(load: OpenLoad, limits: ServerLimits) -> dict[int, list[float]]:
    """When each token comes from the real scheduler, if its steps take what the formula says."""
    scheduler = PlainScheduler(
        PageAllocator(limits.num_pages),
        Limits(
            page_size=limits.page_size,
            max_num_batched_tokens=limits.max_batched_tokens,
            max_running=limits.max_running,
            max_model_len=limits.pool_tokens,
            growth_tokens=limits.growth_tokens,
            max_passes=limits.max_passes,
            vocab_size=10,
            mixed_prompt_tokens=limits.mixed_prompt_tokens,
        ),
    )
    times: dict[int, list[float]] = defaultdict(list)
    waiting = list(enumerate(load.arrivals))
    now = 0.0
    while True:
        while waiting and waiting[0][1][0] <= now:
            room, (_, prompt, answer, _) = waiting.pop(0)
            scheduler.add(Request(room, [1] * prompt, SamplingParams(max_tokens=answer)))
        plan = scheduler.plan()
        if not plan.slices:
            if not waiting:
                return times
            now = waiting[0][1][0]
            continue
        rows = [piece for piece in plan.slices if piece.start == piece.sequence.length - 1]
        chunks = [piece for piece in plan.slices if piece not in rows]
        tokens, square = sum(piece.count for piece in chunks), sum(square_of(piece.start, piece.count) for piece in chunks)
        now += STEPS.step_s(tokens, square, len(rows), sum(piece.sequence.length for piece in rows))
        scheduler.advance(plan)
        scheduler.resolve(plan, [5] * sum(piece.samples for piece in plan.slices))
        for event in scheduler.take_events():
            if isinstance(event, Token):
                times[event.room].append(now)


def simulated_times(load: OpenLoad, limits: ServerLimits) -> tuple[dict[int, list[float]], int]:
    outcome = simulate(Costs(STEPS), FleetShape(num_plain=1, limits=limits), load, 0)
    found = {job.index: [job.first_s, *(job.first_s + job.gaps_s().cumsum())] for job in outcome.jobs}
    return found, sum(job.epoch for job in outcome.jobs)


@st.composite
def loads(draw: st.DrawFn) -> OpenLoad:
    lengths = draw(st.lists(st.tuples(st.integers(1, 2000), st.integers(2, 40), st.integers(1, 30)), min_size=1, max_size=25))
    at_s, rows = 0.0, []
    for gap, prompt, answer in lengths:
        at_s += 0.0000977 * gap  # never two at once, and never with the end of a step: who is first then is nobody's promise
        rows.append((at_s, prompt, answer, False))
    return OpenLoad(tuple(rows))


@settings(max_examples=60)
@given(loads(), st.sampled_from([1000, 40, 20]), st.sampled_from([None, 5]), st.sampled_from([2, 5, 16]))
def test_every_token_comes_when_the_real_scheduler_gives_it(load: OpenLoad, num_pages: int, mixed: int | None, max_running: int) -> None:
    limits = ServerLimits(4, num_pages, max_batched_tokens=24, mixed_prompt_tokens=mixed, max_running=max_running, growth_tokens=8, max_passes=2)
    found, _ = simulated_times(load, limits)
    for room, times in engine_times(load, limits).items():
        assert found[room] == pytest.approx(times, rel=1e-9), f"room {room} of {load.arrivals}"


def test_the_comparison_reaches_retraction() -> None:
    limits = ServerLimits(4, 20, max_batched_tokens=24, max_running=16, growth_tokens=0, max_passes=2)
    load = OpenLoad(tuple((0.001 * number, 8, 30, False) for number in range(8)))
    found, num_retractions = simulated_times(load, limits)
    assert num_retractions > 0
    for room, times in engine_times(load, limits).items():
        assert found[room] == pytest.approx(times, rel=1e-9)
