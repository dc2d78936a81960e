"""A step's plan as tensors."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.attention import Span
from baton.engine.pool import KVPool, Writes
from baton.engine.scheduling.sequence import Slice


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All slices' tokens as rows of one batch.

    token_ids, positions: [rows] int64. sample_rows: [samples] int64, the rows whose logits are wanted, in slice order.
    """

    token_ids: Tensor
    positions: Tensor
    writes: Writes
    sample_rows: Tensor
    samples_all: bool
    spans: list[Span]


def build_batch(slices: List[Slice], pool: KVPool) -> ForwardBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    scattered: list[int] = []
    runs: list[tuple[int, int, int]] = []
    sample_rows: list[int] = []
    spans: list[Span] = []
    page_size = pool.layout.page_size
    for piece in slices:
        end = piece.start + piece.count
        pages = piece.sequence.pages
        row = len(token_ids)
        spans.append(Span(pool, pages, row, piece.start, piece.count))
        token_ids += piece.sequence.tokens[piece.start : end]
        positions += range(piece.start, end)
        for slot, length in pages.runs(piece.start, piece.count, page_size):
            if row == len(scattered) and piece.count == 1:
                scattered.append(slot)
            else:
                runs.append((row, slot, length))
            row += length
        if piece.samples:
            sample_rows.append(len(token_ids) - 1)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        writes=Writes(torch.tensor(scattered, dtype=torch.int64), runs),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        samples_all=len(sample_rows) == len(token_ids),
        spans=spans,
    )
