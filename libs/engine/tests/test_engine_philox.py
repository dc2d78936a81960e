"""The counter-based generator against the published vectors of Philox4x32-10."""

from __future__ import annotations

import pytest

from baton.engine.philox import draw_key, philox4x32

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


def test_a_key_depends_on_seed_and_position_only():
    assert draw_key(0, 0) == (0x6627E8D5, 0xE169C58D)
    assert draw_key(5, 9) == draw_key(5, 9)
    assert len({draw_key(seed, position) for seed in range(40) for position in range(40)}) == 1600
    assert draw_key(1 << 33, 0) != draw_key(0, 0)
    assert draw_key(0, 1 << 33) != draw_key(0, 0)
