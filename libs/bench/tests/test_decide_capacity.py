"""Capacity: monotone fit, crossing, bootstrap."""

from itertools import pairwise

import numpy as np
import pytest
from decide_records import cell
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.decide.capacity import ASSUMED_SPREAD, Curve, capacity_of, contest, crossing_rps, draws_of, falling, limit_of, spread_of

SHARES = st.lists(st.tuples(st.floats(0, 1), st.floats(1, 100)), min_size=1, max_size=8)


@given(SHARES)
def test_the_fit_never_rises_and_keeps_the_weighted_mean(pairs: list[tuple[float, float]]) -> None:
    shares, weights = [share for share, _ in pairs], [weight for _, weight in pairs]
    fitted = fit(shares, weights)
    assert all(a >= b - 1e-9 for a, b in pairwise(fitted))
    assert np.average(fitted, weights=weights) == pytest.approx(np.average(shares, weights=weights))
    assert fit(fitted, weights) == pytest.approx(fitted)


def fit(shares: list[float], weights: list[float]) -> list[float]:
    return list(falling(np.asarray([shares]), np.asarray([weights]))[0])


def test_a_falling_row_is_left_alone() -> None:
    assert fit([1.0, 0.9, 0.2], [1, 1, 1]) == pytest.approx([1.0, 0.9, 0.2])
    assert fit([0.5, 1.0, 0.0], [1, 1, 1]) == pytest.approx([0.75, 0.75, 0.0])
    assert fit([0.5, 1.0, 0.0], [3, 1, 1]) == pytest.approx([0.625, 0.625, 0.0])


def test_rows_are_fitted_each_for_itself() -> None:
    rows = np.asarray([[1.0, 0.9, 0.2], [0.5, 1.0, 0.0]])
    assert falling(rows, np.ones((2, 3)))[1] == pytest.approx([0.75, 0.75, 0.0])


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([1.0, 1.0, 0.8], 2 * 2**0.5), ([1.0, 0.9, 0.0], 2.0), ([1.0, 1.0, 1.0], 4.0), ([0.45, 0.2, 0.0], 0.5), ([0.0, 0.0, 0.0], 0.0)],
)
def test_where_a_row_crosses(shares: list[float], expected: float) -> None:
    assert crossing_rps([1.0, 2.0, 4.0], np.asarray([shares]), 0.9)[0] == pytest.approx(expected)


def test_more_requests_make_a_narrower_interval() -> None:
    widths = []
    for num in (20, 200, 2000):
        cells = [cell("x", rate, share, num=num) for rate, share in ((1.0, 1.0), (2.0, 0.95), (4.0, 0.3))]
        draws = draws_of(Curve.of(cells), 0.9, seed=1)
        found = capacity_of("x", cells, 0.9, draws)
        assert found.low <= found.rps <= found.high
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True)


def test_repeats_that_disagree_make_a_wider_interval() -> None:
    def width(shares: tuple[float, ...]) -> float:
        cells = [cell("x", 1.0, 1.0), cell("x", 4.0, 0.0), *(cell("x", 2.0, share) for share in shares)]
        found = capacity_of("x", cells, 0.9, draws_of(Curve.of(cells), 0.9, seed=1))
        return found.high - found.low

    assert width((0.5, 0.5, 1.0, 1.0)) > 1.3 * width((0.75, 0.75, 0.75, 0.75))


def test_cells_that_no_falling_curve_explains_make_everything_less_sure() -> None:
    steady = Curve.of([cell("x", rate, share) for rate, share in ((1.0, 1.0), (2.0, 0.8), (3.0, 0.8), (4.0, 0.1))])
    wild = Curve.of([cell("x", rate, share) for rate, share in ((1.0, 1.0), (2.0, 0.2), (3.0, 0.9), (4.0, 0.1))])
    assert spread_of([]) == ASSUMED_SPREAD
    assert 1 < spread_of([steady]) < ASSUMED_SPREAD, "few cells that agree"
    assert 1 <= spread_of([steady] * 8) < spread_of([steady]), "many"
    assert spread_of([wild]) > ASSUMED_SPREAD
    assert spread_of([wild] * 8) > 20
    assert spread_of([steady] * 8) < spread_of([steady, wild] * 8) < spread_of([wild] * 8)
    sure, unsure = (np.ptp(np.percentile(draws_of(steady, 0.9, 1, spread), (2.5, 97.5))) for spread in (1.0, 20.0))
    assert unsure > 2 * sure


def test_bounds_are_said() -> None:
    good = [cell("x", 1.0, 1.0), cell("x", 2.0, 1.0)]
    bad = [cell("x", 1.0, 0.3), cell("x", 2.0, 0.1)]
    above, below = (capacity_of("x", cells, 0.9, draws_of(Curve.of(cells), 0.9, 1)) for cells in (good, bad))
    assert (above.at_least, above.at_most, above.rps) == (True, False, 2.0)
    assert (below.at_least, below.at_most) == (False, True)
    assert below.rps < 1.0


def test_what_breaks_first_is_what_most_requests_missed() -> None:
    assert limit_of([cell("x", 1.0, 0.5, missed="itl"), cell("x", 1.0, 0.9, missed="ttft")]) == "itl"
    assert limit_of([cell("x", 1.0, 0.5, missed="errors")]) == "errors"
    assert limit_of([]) == ""


def test_a_contest_with_oneself_is_even() -> None:
    cells = [cell("x", rate, share) for rate, share in ((1.0, 1.0), (2.0, 0.8))]
    draws = {name: draws_of(Curve.of(cells), 0.9, seed) for seed, name in enumerate("ab")}
    found = contest("a", "b", draws)
    assert found.low < 1 < found.high
    assert 0.3 < found.certainty < 0.7
