"""From the posts of a write to the layers of a room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.prefill.write_parts import MAX_PARTS, parts_of

START_NS = 5_000_000_000
MS = 1_000_000


def posts(count: int, num_bytes: int = 100) -> np.ndarray:
    """One after the other, a millisecond each, half a millisecond apart."""
    begins = START_NS + np.arange(count) * 3 * MS // 2
    return np.stack([begins, begins + MS, np.full(count, num_bytes)], axis=1).astype(np.int64)


def test_a_layer_is_a_part_where_there_are_few() -> None:
    parts = parts_of(2, [0, 1, 2], posts(3), START_NS)
    assert [(part.queue, part.first_layer, part.num_layers, part.num_bytes) for part in parts] == [(2, 0, 1, 100), (2, 1, 1, 100), (2, 2, 1, 100)]
    assert [part.begin_s for part in parts] == pytest.approx([0, 0.0015, 0.003])
    assert [part.duration_s for part in parts] == pytest.approx([0.001] * 3)


def test_many_layers_are_told_in_groups() -> None:
    parts = parts_of(0, list(range(30)), posts(30), START_NS)
    assert [(part.first_layer, part.num_layers) for part in parts] == [(first, 2) for first in range(0, 30, 2)]
    assert parts[1].begin_s == pytest.approx(0.003)
    assert parts[1].duration_s == pytest.approx(0.0025)


def test_chunks_of_a_prompt_stay_apart() -> None:
    parts = parts_of(0, [*range(30)] * 4, posts(120), START_NS)
    assert [(part.first_layer, part.num_layers) for part in parts] == [(0, 8), (8, 8), (16, 8), (24, 6)] * 4


def test_of_very_many_chunks_some_are_one_part() -> None:
    parts = parts_of(0, [*range(4)] * 100, posts(400), START_NS)
    assert len(parts) == 15
    assert {(part.first_layer, part.num_layers) for part in parts} == {(0, 4)}


def test_nothing_is_known_of_nothing() -> None:
    assert parts_of(0, [], posts(0), START_NS) == []
    assert parts_of(0, [0, 1], posts(0), START_NS) == []


@given(num_layers=st.integers(1, 80), num_chunks=st.integers(1, 40), known=st.floats(0.01, 1))
def test_no_byte_and_no_layer_is_lost_and_parts_are_few(num_layers: int, num_chunks: int, known: float) -> None:
    """Also where the library's last row stands for several posts."""
    layers = [*range(num_layers)] * num_chunks
    rows = posts(max(1, round(len(layers) * known)))
    parts = parts_of(0, layers, rows, START_NS)
    assert sum(part.num_bytes for part in parts) == rows[:, 2].sum()
    assert 1 <= len(parts) <= MAX_PARTS
    assert [part.begin_s for part in parts] == sorted(part.begin_s for part in parts)
    assert max(part.first_layer + part.num_layers for part in parts) <= num_layers
    if len(rows) == len(layers):
        assert {layer for part in parts for layer in range(part.first_layer, part.first_layer + part.num_layers)} == set(range(num_layers))
