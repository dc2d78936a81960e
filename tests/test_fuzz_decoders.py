"""Every decoder of bytes from another process on random and on damaged bytes. Longer, and guided by coverage: `python -m tests.fuzz`."""

from __future__ import annotations

import pytest
from fuzz.targets import TARGETS
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A sound input with some places changed, cut out or put in."""
    raw = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(raw)))
        raw[place : place + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(raw)


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_taken_or_refused_by_name(name: str) -> None:
    target = TARGETS[name]
    assert all(target(seed) for seed in target.seeds), "a sound input is taken"

    @settings(deadline=None, max_examples=300, database=None)
    @given(st.one_of(st.binary(max_size=300), damaged(target.seeds), damaged(target.seeds)))
    def run(data: bytes) -> None:
        target(data)

    run()
