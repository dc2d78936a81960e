"""Arrival processes: rate, burstiness, traces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.arrivals import (
    ArrivalOptions,
    ClosedLoop,
    GammaArrivals,
    PoissonArrivals,
    TraceArrivals,
    build_arrivals,
    gap_statistics,
)
from baton.bench.errors import SettingError
from baton.bench.request import Message, Request

NUM = 20_000


@pytest.mark.parametrize("rate", [0.5, 10.0, 400.0])
def test_poisson_has_its_rate_and_a_coefficient_of_variation_of_one(rate: float) -> None:
    mean_s, cv = gap_statistics(PoissonArrivals(rate, seed=3).times_s(NUM))
    assert mean_s * rate == pytest.approx(1.0, rel=0.03)
    assert cv == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0, 3.0])
def test_gamma_keeps_the_rate_whatever_its_burstiness(cv: float) -> None:
    mean_s, found = gap_statistics(GammaArrivals(10.0, cv, seed=3).times_s(NUM))
    assert mean_s * 10 == pytest.approx(1.0, rel=0.08)
    assert found == pytest.approx(cv, rel=0.08)


@given(st.integers(0, 2**31), st.floats(0.01, 1000), st.floats(0.1, 5), st.integers(1, 50))
def test_times_grow_and_are_a_function_of_the_seed(seed: int, rate: float, cv: float, num: int) -> None:
    for arrivals in (PoissonArrivals(rate, seed), GammaArrivals(rate, cv, seed)):
        times = arrivals.times_s(num)
        assert len(times) == num
        assert times[0] >= 0
        assert (np.diff(times) >= 0).all()
        assert (times == arrivals.times_s(num)).all()


def test_more_requests_do_not_move_the_first() -> None:
    arrivals = PoissonArrivals(5.0, seed=1)
    assert (arrivals.times_s(100)[:10] == arrivals.times_s(10)).all()


def test_a_trace_starts_at_zero_and_runs_at_its_speed() -> None:
    assert TraceArrivals((5.0, 6.0, 9.0), speed=2.0).times_s(3).tolist() == [0.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PoissonArrivals(0.0, 1), "rate_rps is 0.0"),
        (lambda: GammaArrivals(1.0, 0.0, 1), "cv is 0.0"),
        (lambda: TraceArrivals((2.0, 1.0)), "in order of time"),
        (lambda: TraceArrivals((1.0,), speed=0.0), "speed is 0.0"),
        (lambda: TraceArrivals((1.0,)).times_s(2), "num_requests is 2, but must be at most 1"),
        (lambda: ClosedLoop(0), "num_clients is 0"),
        (lambda: build_arrivals(ArrivalOptions("constant"), []), "arrivals is 'constant'"),
        (lambda: build_arrivals(ArrivalOptions("trace"), [Request(0, "chat", (Message("user", "a"),), 1, False)]), "have no times"),
    ],
)
def test_bad_input_is_named(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(SettingError, match=named):
        make()
