"""The rows of a decode step as the host looks them up: once for all steps that have the same ones."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

from baton.engine.device.extras import Extra, asked_of
from baton.engine.device.seats import Seats
from baton.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Seated:
    """Sequences in the order of their rows, and where they sit. extras: (row, its Extra) where logits are adjusted. asked: as of Part.

    version: of the seats; all of this holds for no other.
    """

    version: int
    sequences: list[Sequence]
    seats: list[int]
    extras: List[tuple[int, Extra]]
    asked: List[tuple[int, int]]


def seated_of(seats: Seats, sequences: list[Sequence]) -> Seated:
    """All of them have seats."""
    extras = [(row, extra) for row, sequence in enumerate(sequences) if (extra := seats.extra(sequence)) is not None]
    asked = asked_of([sequence.request.sampling for sequence in sequences])
    return Seated(seats.version, sequences, [seats.of(sequence) for sequence in sequences], extras, asked)
