"""The counter-based generator against the published vectors of Philox4x32-10."""

from __future__ import annotations

import pytest

from baton.engine.philox import philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_depends_on_seed_and_position_only():
    assert uniform(5, 9) == uniform(5, 9)
    assert len({uniform(seed, position) for seed in range(40) for position in range(40)}) == 1600
    assert uniform(1 << 33, 0) != uniform(0, 0)
    assert uniform(0, 1 << 33) != uniform(0, 0)


def test_uniform_is_uniform():
    numbers = [uniform(123, position) for position in range(20000)]
    counts = [0] * 20
    for number in numbers:
        assert 0 <= number < 1
        counts[int(number * 20)] += 1
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
    assert chi_square < 43.8, "19 degrees of freedom, p = 0.001"
