"""A step's plan as tensors."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.attention import Span
from baton.engine.pool import KVPool
from baton.engine.scheduling.sequence import Slice


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All slices' tokens as rows of one batch.

    token_ids, positions, slots: [rows] int64. sample_rows: [samples] int64, the rows whose logits are wanted, in slice order.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    samples_all: bool
    spans: list[Span]


def build_batch(slices: List[Slice], pool: KVPool) -> ForwardBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_rows: list[int] = []
    spans: list[Span] = []
    page_size = pool.layout.page_size
    for piece in slices:
        end = piece.start + piece.count
        pages = piece.sequence.pages
        spans.append(Span(pool, pages, len(token_ids), piece.start, piece.count))
        token_ids += piece.sequence.tokens[piece.start : end]
        positions += range(piece.start, end)
        for slot, length in pages.runs(piece.start, piece.count, page_size):
            slots += range(slot, slot + length)
        if piece.samples:
            sample_rows.append(len(token_ids) - 1)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        samples_all=len(sample_rows) == len(token_ids),
        spans=spans,
    )
