"""Simulated servers, plain and split, against the engine's own schedulers: every token at the same time, also when pages run out."""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("baton.engine", reason="the engine is not installed: bench does not need it, its scheduler is what is compared with")

from baton.bench.plan import Costs, FleetShape, OpenLoad, PathCosts, ServerLimits, StepCosts, simulate
from baton.bench.plan.seats import square_of
from baton.engine.allocator import PageAllocator
from baton.engine.page_book import PageBook
from baton.engine.ports import Landed, Published, PublishedSlots, SendDone
from baton.engine.scheduling.base import Scheduler
from baton.engine.scheduling.decode import DecodeScheduler
from baton.engine.scheduling.plain import PlainScheduler
from baton.engine.scheduling.prefill import PrefillScheduler
from baton.engine.scheduling.sequence import Limits, StepPlan
from baton.engine.types import Request, SamplingParams, Token, TransferStats

STEPS = StepCosts(0.011, 0.0007, 0.0000013, 0.017, 0.0023, 0.000031, mixed_share=0.6)


PATH = PathCosts(kv_bytes_per_token=1.0, bandwidth=1e18, tail_share=0.0, handoff_s=0.00313, bootstrap_s=0.00171)
STATS = TransferStats("made", 1, 1, 0.0, 0.0, digest=False)


def engine_limits(limits: ServerLimits) -> Limits:
    return Limits(
        page_size=limits.page_size,
        max_num_batched_tokens=limits.max_batched_tokens,
        max_running=limits.max_running,
        max_model_len=limits.pool_tokens,
        growth_tokens=limits.growth_tokens,
        max_passes=limits.max_passes,
        vocab_size=10,
        mixed_prompt_tokens=limits.mixed_prompt_tokens,
    )


class Engines:
    """Real schedulers in simulated time: a step takes what the formula says, and commands are taken between steps."""

    def __init__(self, load: OpenLoad) -> None:
        self.load = load
        self.now = 0.0
        self.times: dict[int, list[float]] = defaultdict(list)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._busy: set[int] = set()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._numbers), act))

    def run(self, arrive: Callable[[Request], None]) -> dict[int, list[float]]:
        for room, (at_s, prompt, answer, _) in enumerate(self.load.arrivals):
            self.at(at_s, partial(arrive, Request(room, [1] * prompt, SamplingParams(max_tokens=answer))))
        while self._heap:
            self.now, _, act = heapq.heappop(self._heap)
            act()
        return self.times

    def wake(self, scheduler: Scheduler) -> None:
        if id(scheduler) not in self._busy:
            self._start(scheduler)

    def _start(self, scheduler: Scheduler) -> None:
        self._busy.discard(id(scheduler))
        scheduler.poll()
        plan = scheduler.plan()
        self._note(scheduler)
        if not plan.slices:
            return
        self._busy.add(id(scheduler))
        is_prefill = isinstance(scheduler, PrefillScheduler)
        rows = [] if is_prefill else [piece for piece in plan.slices if piece.start == piece.sequence.length - 1]
        chunks = [piece for piece in plan.slices if piece not in rows]
        tokens, square = sum(piece.count for piece in chunks), sum(square_of(piece.start, piece.count) for piece in chunks)
        took_s = STEPS.step_s(tokens, square, len(rows), sum(piece.sequence.length for piece in rows))
        scheduler.advance(plan)
        self.at(self.now + took_s, partial(self._end, scheduler, plan))

    def _end(self, scheduler: Scheduler, plan: StepPlan) -> None:
        scheduler.resolve(plan, [5] * sum(piece.samples for piece in plan.slices))
        self._note(scheduler)
        self._start(scheduler)

    def _note(self, scheduler: Scheduler) -> None:
        for event in scheduler.take_events():
            if isinstance(event, Token):
                self.times[event.room].append(self.now)


def engine_times(load: OpenLoad, limits: ServerLimits) -> dict[int, list[float]]:
    """When each token comes from the real plain scheduler."""
    engines = Engines(load)
    scheduler = PlainScheduler(PageBook(PageAllocator(limits.num_pages)), engine_limits(limits))

    def arrive(request: Request) -> None:
        scheduler.add(request)
        engines.wake(scheduler)

    return engines.run(arrive)


class Ports:
    """Both ports of a pair whose path takes what `PATH` says and never fails."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.exported: list[object] = []
        self.imported: list[object] = []
        self.prefill: PrefillScheduler
        self.decode: DecodeScheduler

    def publish(self, request: Request, reservation: object) -> None:
        self.engines.at(self.engines.now + PATH.bootstrap_s, partial(self._published, request.room))

    def finish(self, room: int, first_token: int) -> None:
        self.engines.at(self.engines.now + PATH.handoff_s, partial(self._moved, room, first_token))

    def _published(self, room: int) -> None:
        self.imported.append(Published(room))
        self.exported.append(PublishedSlots(room, 0))
        self.engines.wake(self.prefill)

    def _moved(self, room: int, first_token: int) -> None:
        self.exported.append(SendDone(room, STATS))
        self.imported.append(Landed(room, first_token, False, 0.0))
        self.engines.wake(self.decode)
        self.engines.wake(self.prefill)

    def expect(self, request: Request) -> None:
        """Its publication comes when decode has reserved."""

    def start(self, room: int, pages: object, num_tokens: int) -> None:
        """Pages leave beside the computing."""

    def quarantined_pages(self) -> int:
        return 0


class Exporter:
    def __init__(self, ports: Ports) -> None:
        self.expect, self.start, self.finish = ports.expect, ports.start, ports.finish
        self._events = ports.exported

    def poll(self) -> list:
        events = list(self._events)
        self._events.clear()
        return events


class Importer:
    def __init__(self, ports: Ports) -> None:
        self.publish, self.quarantined_pages = ports.publish, ports.quarantined_pages
        self._events = ports.imported

    def poll(self) -> list:
        events = list(self._events)
        self._events.clear()
        return events


def split_times(load: OpenLoad, limits: ServerLimits) -> dict[int, list[float]]:
    """When each token comes from a real prefill and a real decode scheduler."""
    engines = Engines(load)
    ports = Ports(engines)
    prefill = PrefillScheduler(PageBook(PageAllocator(limits.num_pages)), engine_limits(limits), Exporter(ports))  # type: ignore[arg-type]
    decode = DecodeScheduler(PageBook(PageAllocator(limits.num_pages)), engine_limits(limits), Importer(ports))  # type: ignore[arg-type]
    ports.prefill, ports.decode = prefill, decode

    def arrive(request: Request) -> None:
        prefill.add(Request(request.room, list(request.prompt), request.sampling))
        decode.add(request)
        engines.wake(prefill)
        engines.wake(decode)

    return engines.run(arrive)


def simulated_times(load: OpenLoad, shape: FleetShape) -> tuple[dict[int, list[float]], int]:
    outcome = simulate(Costs(STEPS, path=PATH), shape, load, 0)
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


POOLS, MIXED, RUNNING = st.sampled_from([1000, 40, 20]), st.sampled_from([None, 5]), st.sampled_from([2, 5, 16])


@settings(max_examples=60)
@given(loads(), POOLS, MIXED, RUNNING)
def test_every_token_of_a_plain_server_comes_when_the_scheduler_gives_it(load: OpenLoad, num_pages: int, mixed: int | None, max_running: int) -> None:
    limits = ServerLimits(4, num_pages, max_batched_tokens=24, mixed_prompt_tokens=mixed, max_running=max_running, growth_tokens=8, max_passes=2)
    found, _ = simulated_times(load, FleetShape(num_plain=1, limits=limits))
    for room, times in engine_times(load, limits).items():
        assert found[room] == pytest.approx(times, rel=1e-9), f"room {room} of {load.arrivals}"


@settings(max_examples=60)
@given(loads(), POOLS, MIXED)
def test_every_token_of_a_pair_comes_when_the_schedulers_give_it(load: OpenLoad, num_pages: int, mixed: int | None) -> None:
    """With seats for all: who of more landed rooms than --max-running is passed over after a retraction is simulated in order of landing only."""
    limits = ServerLimits(4, num_pages, max_batched_tokens=25, mixed_prompt_tokens=mixed, max_running=25, growth_tokens=8, max_passes=2)
    found, _ = simulated_times(load, FleetShape(num_prefill=1, num_decode=1, limits=limits))
    real = split_times(load, limits)
    assert set(real) == set(found)
    for room, times in real.items():
        assert found[room] == pytest.approx(times, rel=1e-9), f"room {room} of {load.arrivals}"


def test_the_comparison_reaches_retraction() -> None:
    limits = ServerLimits(4, 20, max_batched_tokens=24, max_running=16, growth_tokens=0, max_passes=2)
    load = OpenLoad(tuple((0.001 * number, 8, 30, False) for number in range(8)))
    for shape, times_of in (
        (FleetShape(num_plain=1, limits=limits), engine_times),
        (FleetShape(num_prefill=1, num_decode=1, limits=limits), split_times),
    ):
        found, num_retractions = simulated_times(load, shape)
        assert num_retractions > 0
        for room, times in times_of(load, limits).items():
            assert found[room] == pytest.approx(times, rel=1e-9)
