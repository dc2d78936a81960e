"""Numbers in a report: rounded, and never with an exponent."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.numbers import plain


@pytest.mark.parametrize(
    ("value", "text"),
    [(1870.0, "1,870"), (1866.4, "1,870"), (0.8594, "0.859"), (10.71, "10.7"), (2.5, "2.5"), (999.6, "1,000"), (0.0, "0"), (1e6, "1,000,000"),
     (0.00001234, "0.0000123"), (-1234.0, "-1,230"), (3.0, "3"), (1200.0, "1,200")],
)  # fmt: skip
def test_three_digits_as_a_reader_writes_them(value: float, text: str) -> None:
    assert plain(value) == text


def test_more_digits_where_they_are_asked_for() -> None:
    assert (plain(12345.6, 4), plain(13.104, 4)) == ("12,350", "13.1")


@given(st.floats(1e-9, 1e15), st.integers(1, 6))
def test_the_value_is_kept_to_its_digits_and_there_is_no_exponent(value: float, digits: int) -> None:
    text = plain(value, digits)
    assert "e" not in text
    assert math.isclose(float(text.replace(",", "")), value, rel_tol=0.51 * 10 ** (1 - digits))
