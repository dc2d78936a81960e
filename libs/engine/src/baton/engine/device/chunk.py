"""What a pass over chunks of prompts needs to know of them, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

from baton.engine.device.seats import pages_from
from baton.engine.scheduling.sequence import Slice


@dataclass(slots=True)
class Chunk:
    """One row for each token of the slices, one after the other.

    tokens, positions, slots: of each row. starts: the first row of each slice, and the number of rows. lengths: tokens that the last row of
    each slice sees. pages: of each slice's sequence. whole: the slices that draw a token, and sampled: the row that each of those draws from.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    lengths: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def table(self) -> list[list[int]]:
        """The pages of each slice, as many as the longest has."""
        width = max(len(each) for each in self.pages)
        return [each + [0] * (width - len(each)) for each in self.pages]


def chunk_of(slices: List[Slice], page_size: int) -> Chunk:
    chunk = Chunk()
    for index, piece in enumerate(slices):
        end = piece.start + piece.count
        chunk.tokens += piece.sequence.tokens[piece.start : end]
        chunk.positions += range(piece.start, end)
        for first, count in piece.sequence.pages.runs(piece.start, piece.count, page_size):
            chunk.slots += range(first, first + count)
        chunk.starts.append(len(chunk.tokens))
        chunk.lengths.append(end)
        chunk.pages.append(pages_from(piece.sequence.pages, 0))
        if piece.samples:
            chunk.whole.append(index)
            chunk.sampled.append(len(chunk.tokens) - 1)
    return chunk
