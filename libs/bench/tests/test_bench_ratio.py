"""Ratios of pairs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench import compare


def test_the_median_of_neighbours_ignores_a_drift_of_the_machine() -> None:
    """The machine gets ten times slower halfway: the medians mix both halves, the ratio of neighbours does not."""
    baseline = [10.0, 10.0, 10.0, 100.0, 100.0, 100.0, 100.0]
    subject = [11.0, 11.0, 11.0, 110.0, 110.0, 110.0, 110.0]
    found = compare(subject, baseline)
    assert found.ratio == pytest.approx(1.1)
    assert (found.ratio_low, found.ratio_high) == pytest.approx((1.1, 1.1))
    assert (found.subject, found.baseline, found.num_pairs) == (110.0, 100.0, 7)


def test_one_outlier_does_not_move_the_ratio() -> None:
    assert compare([1.0, 1.0, 1.0, 1.0, 50.0], [1.0] * 5).ratio == 1.0


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=4, max_size=40))
def test_quartiles_enclose_the_ratio(pairs: list[tuple[float, float]]) -> None:
    found = compare([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
    assert found.ratio_low <= found.ratio <= found.ratio_high


@pytest.mark.parametrize(
    ("subject", "baseline", "named"),
    [([1.0] * 3, [1.0] * 3, "at least 4 pairs, got 3 and 3"), ([1.0] * 5, [1.0] * 4, "got 5 and 4"), ([1.0] * 4, [1.0, 1.0, 0.0, 1.0], r"is 0\.0")],
)
def test_bad_input_is_named(subject: list[float], baseline: list[float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        compare(subject, baseline)
