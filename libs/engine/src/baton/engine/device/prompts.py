"""Chunks of prompts: many rows a sequence, launched layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

import torch
from torch import Tensor

from baton.engine.device.model import DeviceModel, Rows
from baton.engine.device.products import Mode
from baton.engine.device.seats import padded_stops, pages_from, signed
from baton.engine.device.steps import PagedRows
from baton.engine.device.upload import upload
from baton.engine.given_up import GivenUp
from baton.engine.pool import KVPool
from baton.engine.runner import draw_of
from baton.engine.scheduling.sequence import Slice
from baton.kernels import fresh_attention, prefill_attention, sample


class Prompts:
    """Runs chunks: their keys and values go to the pool, and a token is drawn for each prompt that is whole."""

    def __init__(self, model: DeviceModel, pool: KVPool, *, deterministic: bool) -> None:
        self._model = model
        self._pool = pool
        self._deterministic = deterministic

    @torch.inference_mode()
    def run(self, slices: List[Slice], layer_done: Callable[[int], None] | None, given_up: GivenUp | None = None) -> Tensor | None:
        """[samples] int64 on the device, in the order of the slices that sample; -1 where logits were not finite; None when none does, and when the
        pass was given up."""
        device, page_size = self._model.device, self._pool.layout.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, sampled = [0], []
        for piece in slices:
            end = piece.start + piece.count
            tokens += piece.sequence.tokens[piece.start : end]
            positions += range(piece.start, end)
            for first, count in piece.sequence.pages.runs(piece.start, piece.count, page_size):
                slots += range(first, first + count)
            starts.append(len(tokens))
            if piece.samples:
                sampled.append(len(tokens) - 1)
        rows = Rows(*(upload(each, torch.int64, device) for each in (tokens, positions, slots, sampled)))
        attention = ChunkAttention(slices, starts, self._deterministic, device)
        mode = Mode.INVARIANT if self._deterministic else Mode.MANY
        logits = self._model.forward(rows, self._pool, attention, mode, layer_done, given_up)
        return None if logits is None else self._draw(logits, [piece for piece in slices if piece.samples])

    def _draw(self, logits: Tensor, slices: List[Slice]) -> Tensor:
        draws = [draw_of(piece) for piece in slices]
        forbidden = [padded_stops(draw.params.stop_token_ids if draw.index < draw.params.min_tokens else ()) for draw in draws]

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return upload(values, dtype, logits.device)

        return sample(
            logits,
            column([draw.params.temperature for draw in draws], torch.float32),
            column([draw.params.top_k for draw in draws], torch.int32),
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

    def __init__(self, slices: List[Slice], starts: list[int], deterministic: bool, device: torch.device) -> None:
        self._starts = starts
        self._longest = max(piece.count for piece in slices)
        self._fresh = not deterministic and all(piece.start == 0 for piece in slices)
        lengths = [piece.start + piece.count for piece in slices]
        self._max_len = max(lengths)
        numbers = [pages_from(piece.sequence.pages, 0) for piece in slices]
        width = max(len(each) for each in numbers)
        self._table = upload([each + [0] * (width - len(each)) for each in numbers], torch.int32, device)
        self._lengths = upload(lengths, torch.int32, device)
        self._query_starts = upload(starts, torch.int32, device)
        whole = [index for index, piece in enumerate(slices) if piece.samples]
        one_each = upload(list(range(len(whole) + 1)), torch.int32, device) if deterministic else None
        chosen = upload(whole, torch.int64, device)
        self._sampled = PagedRows(self._table[chosen], self._lengths[chosen], one_each)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        if self._fresh and (not window or self._max_len <= window):
            return fresh_attention(query, keys, values, self._starts)
        return prefill_attention(query, *pages, self._table, self._query_starts, self._lengths, self._longest, window=window)

    def of_sampled(self, query: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        return self._sampled.of_sampled(query, pages, window)
