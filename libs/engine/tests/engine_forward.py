"""A model driven without an engine. Imports no transformers, for processes that must start quickly."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from baton.engine import EngineConfig, Request, SamplingParams, plan_layout
from baton.engine.batch import build_batch
from baton.engine.model_config import ModelConfig
from baton.engine.models.llama import LlamaModel
from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool
from baton.engine.scheduling.sequence import Sequence, Slice
from baton.engine.types import Extent

VOCAB = 131


def prompts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def forward_of(
    model: LlamaModel, held: ModelConfig, tokens: list[int], extents: list[Extent], chunks: list[int], page_size: int = 4
) -> tuple[torch.Tensor, KVPool]:
    """As `forward`, and the pool; `held` says whose heads it has (the model's own, or one rank's share)."""
    config = EngineConfig(num_pages=128, page_size=page_size, dtype=str(model.dtype).removeprefix("torch."))
    pool = KVPool(plan_layout(held, config), model.dtype)
    pool.planes.fill_(float("nan"))
    table = PageTable()
    for extent in extents:
        table.append(extent)
    sequence = Sequence(Request(1, tokens, SamplingParams()), tokens, pages=table)
    rows = []
    for start, count in zip([sum(chunks[:index]) for index in range(len(chunks))], chunks, strict=True):
        rows.append(model.forward(build_batch([Slice(sequence, start, count, samples=True)], pool), pool))
    return torch.cat(rows), pool
