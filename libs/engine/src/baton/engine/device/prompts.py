"""Chunks of prompts: many rows a sequence, launched layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from itertools import pairwise

import torch
from torch import Tensor

from baton.engine.adjust import adjust
from baton.engine.device.chunk import Chunk, chunk_of
from baton.engine.device.chunk_graphs import ChunkGraphs
from baton.engine.device.extras import Part, asked_of, part
from baton.engine.device.model import DeviceModel, Rows
from baton.engine.device.products import Mode
from baton.engine.device.seats import bounded, padded_stops, signed
from baton.engine.device.steps import PagedRows
from baton.engine.device.upload import upload
from baton.engine.given_up import GivenUp
from baton.engine.pool import KVPool
from baton.engine.prompt_scores import Also
from baton.engine.runner import draw_of
from baton.engine.sampler import Draw
from baton.engine.scheduling.sequence import Slice
from baton.kernels import fresh_attention, prefill_attention, sample


class Prompts:
    """Runs chunks: their keys and values go to the pool, and a token is drawn for each prompt that is whole.

    graphs: short chunks go there; None: none do.
    """

    def __init__(self, model: DeviceModel, pool: KVPool, graphs: ChunkGraphs | None, *, deterministic: bool) -> None:
        self._model = model
        self._pool = pool
        self._graphs = graphs
        self._deterministic = deterministic
        self.launches: Counter[str] = Counter() if graphs is None else graphs.launches

    @torch.inference_mode()
    def run(
        self, slices: List[Slice], layer_done: Callable[[int], None] | None, given_up: GivenUp | None = None, also: Also | None = None
    ) -> Part | None:
        """also: as of the model; no graph has it.

        What was drawn, in the order of the slices that sample; None when none does, and when the pass was given up."""
        chunk = chunk_of(slices, self._pool.layout.page_size)
        if self._graphs is not None and also is None and self._graphs.takes(chunk):
            logits = self._graphs.run(chunk, layer_done, given_up)
        else:
            self.launches["launched"] += 1
            logits = self._launch(chunk, layer_done, given_up, also)
        return None if logits is None else self._draw(logits, [piece for piece in slices if piece.samples])

    def _launch(self, chunk: Chunk, layer_done: Callable[[int], None] | None, given_up: GivenUp | None, also: Also | None) -> Tensor | None:
        columns = (chunk.tokens, chunk.positions, chunk.slots, chunk.sampled)
        rows = Rows(*(upload(each, torch.int64, self._model.device) for each in columns))
        attention = ChunkAttention(chunk, self._deterministic, self._model.device)
        mode = Mode.INVARIANT if self._deterministic else Mode.MANY
        return self._model.forward(rows, self._pool, attention, mode, layer_done, given_up, also=also)

    def _draw(self, logits: Tensor, slices: List[Slice]) -> Part:
        draws = [draw_of(piece) for piece in slices]
        asked = asked_of([draw.params for draw in draws])
        as_given = logits[upload([row for row, _ in asked], torch.int64, logits.device)] if asked else None
        if any(draw.params.adjusts for draw in draws):
            logits = logits.float()
        for row, draw in enumerate(draws):
            if draw.params.adjusts:
                adjust(logits[row], draw.params, upload(draw.history, torch.int64, logits.device), draw.num_answered)
        return part(self._sample(logits, draws), asked, as_given)

    def _sample(self, logits: Tensor, draws: List[Draw]) -> Tensor:
        forbidden = [padded_stops(draw.params.stop_token_ids if draw.index < draw.params.min_tokens else ()) for draw in draws]

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return upload(values, dtype, logits.device)

        return sample(
            logits,
            column([draw.params.temperature for draw in draws], torch.float32),
            column([bounded(draw.params.top_k) for draw in draws], torch.int32),
            column([draw.params.top_p for draw in draws], torch.float32),
            column([draw.params.min_p for draw in draws], torch.float32),
            upload([signed(draw.params.seed) for draw in draws], torch.int64, logits.device),
            upload([draw.position for draw in draws], torch.int64, logits.device),
            upload(forbidden, torch.int32, logits.device),
        )


class ChunkAttention:
    """Attention of chunks. Prompts that start here and see all of themselves go through the library, everything else over the pages.

    Deterministic: always over the pages, so that a row does not depend on where a chunk began.
    """

    def __init__(self, chunk: Chunk, deterministic: bool, device: torch.device) -> None:
        self._starts = chunk.starts
        self._longest = max(end - start for start, end in pairwise(chunk.starts))
        self._fresh = not deterministic and chunk.num_rows == sum(chunk.lengths)
        self._max_len = max(chunk.lengths)
        self._table = upload(chunk.table(), torch.int32, device)
        self._lengths = upload(chunk.lengths, torch.int32, device)
        self._query_starts = upload(chunk.starts, torch.int32, device)
        one_each = upload(list(range(len(chunk.whole) + 1)), torch.int32, device) if deterministic else None
        chosen = upload(chunk.whole, torch.int64, device)
        self._sampled = PagedRows(self._table[chosen], self._lengths[chosen], one_each)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        if self._fresh and (not window or self._max_len <= window):
            return fresh_attention(query, keys, values, self._starts)
        return prefill_attention(query, *pages, self._table, self._query_starts, self._lengths, self._longest, window=window)

    def of_sampled(self, query: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        return self._sampled.of_sampled(query, pages, window)
