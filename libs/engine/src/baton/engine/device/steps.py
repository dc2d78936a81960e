"""Decode steps: one token for each seat of a batch, on a GPU as captured graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import nullcontext

import torch
from torch import Tensor

from baton.engine.device.model import DeviceModel, Rows
from baton.engine.device.products import Mode
from baton.engine.device.seats import FREE_FROM, MIN_P, POSITION, SEED, TEMPERATURE, TOKEN, TOP_K, TOP_P, Seats
from baton.engine.device.upload import upload
from baton.engine.pool import KVPool
from baton.kernels import can_chain, chain_launches, decode_attention, prefill_attention, sample, seat_drawn, seat_rows

#: Up to so many rows one kernel streams the weights; from there on the library's product is the faster one.
FEW_ROWS = 16


class DecodeSteps:
    """Runs batches of seats, padded to the next of `sizes`.

    A step reads its inputs from the seats and leaves its outcome there: the drawn token and the next position. So one step can follow another
    without the host knowing what was drawn. capture: record each size as a CUDA graph (`prepare`), and replay it.
    """

    def __init__(self, model: DeviceModel, pool: KVPool, seats: Seats, sizes: List[int], *, deterministic: bool, capture: bool) -> None:
        self._model = model
        self._pool = pool
        self._seats = seats
        self._sizes = sorted(sizes)
        self._deterministic = deterministic
        self._capture = capture
        device = model.device
        self._batch = torch.full((self._sizes[-1],), seats.num_seats, dtype=torch.int64, device=device)
        self._drawn = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)
        # Kept for what is done behind the step: rows of which more is asked than a captured step does for all.
        self._logits = torch.zeros(self._sizes[-1], model.config.vocab_size, dtype=model.dtype, device=device)
        self._starts = torch.arange(self._sizes[-1] + 1, dtype=torch.int32, device=device)
        self._seated: list[int] = []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.launches: Counter[str] = Counter()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures every size, the largest first, so that the smaller ones reuse its memory. Must run on the stream that will replay."""
        if not self._capture:
            return
        # Other ranks capture on threads of their own meanwhile: what they call must not end this one's.
        errors = "global" if self._model.group is None else "thread_local"
        memory = None
        for size in reversed(self._sizes):
            graph = torch.cuda.CUDAGraph()
            with chain_launches() if can_chain(self._model.device) else nullcontext():
                self._compute(size)  # compiles kernels and makes the libraries' workspaces
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, pool=memory, stream=torch.cuda.current_stream(), capture_error_mode=errors):
                    self._compute(size)
            memory = graph.pool()
            self._graphs[size] = graph

    @torch.inference_mode()
    def run(self, seats: list[int]) -> Tensor:
        """One token for each of `seats`, in order: [n] int64 on the device, -1 where the logits were not finite. The next run overwrites it."""
        size = next(size for size in self._sizes if size >= len(seats))
        padded = seats + [self._seats.num_seats] * (size - len(seats))
        if padded != self._seated[:size]:
            self._batch[:size].copy_(upload(padded, torch.int64, self._batch.device))
            self._seated[:size] = padded
        graph = self._graphs.get(size)
        self.launches["launched" if graph is None else "replayed"] += 1
        if graph is None:
            self._compute(size)
        else:
            graph.replay()
        return self._drawn[: len(seats)]

    def logits(self, rows: List[int]) -> Tensor:
        """[rows, vocabulary] in the model's dtype, a copy: what the last run drew from, as the model gave it."""
        return self._logits[upload(rows, torch.int64, self._logits.device)]

    @torch.inference_mode()
    def redraw(self, rows: List[int], change: Callable[[int, Tensor], None]) -> None:
        """Right behind `run`: its token of each of `rows` is drawn again, from logits [vocabulary] float32 that change(i, logits) has changed in
        place, for i in range(len(rows)). The next step computes the new token."""
        seats, index = self._seats, upload(rows, torch.int64, self._batch.device)
        batch = self._batch[index]
        logits = self._logits[index].float()
        for place in range(len(rows)):
            change(place, logits[place])
        wide, small, real = seats.wide[:, batch], seats.small[:, batch], seats.real[:, batch]
        after = wide[POSITION]  # the step has moved it on to where its token goes
        forbidden = torch.where(after < wide[FREE_FROM], small[1:], -1).t().contiguous()
        drawn = sample(logits, real[TEMPERATURE], small[TOP_K], real[TOP_P], real[MIN_P], wide[SEED], after, forbidden)
        self._drawn.index_copy_(0, index, drawn)
        seats.wide[TOKEN].index_copy_(0, batch, drawn.clamp(min=0))

    def _compute(self, size: int) -> None:
        seats, batch, logits = self._seats, self._batch[:size], self._logits[:size]
        of = seat_rows(batch, seats.wide, seats.small, seats.real, seats.table, self._pool.layout.page_size)
        rows = Rows(of.token, of.position, of.slot, sampled=None)
        attention = PagedRows(of.pages, of.length, self._starts[: size + 1] if self._deterministic else None)
        self._model.forward(rows, self._pool, attention, self._mode(size), out=logits)
        drawn = sample(logits, of.temperature, of.top_k, of.top_p, of.min_p, of.seed, of.after, of.forbidden)
        seat_drawn(batch, drawn, of.after, seats.wide, self._drawn[:size])

    def _mode(self, size: int) -> Mode:
        if self._deterministic:
            return Mode.INVARIANT
        return Mode.FEW if size <= FEW_ROWS else Mode.MANY


class PagedRows:
    """One row a sequence, over all pages of that sequence. table [n, pages] int32, lengths [n] int32 (0: padding).

    starts [n + 1] int32, for the deterministic mode: a row is then a prompt of one token, so that it is computed as it would be in a prompt.
    """

    def __init__(self, table: Tensor, lengths: Tensor, starts: Tensor | None) -> None:
        self._table = table
        self._lengths = lengths
        self._starts = starts

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        return self.of_sampled(query, pages, window)

    def of_sampled(self, query: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        if self._starts is None:
            return decode_attention(query, *pages, self._table, self._lengths, window=window)
        return prefill_attention(query, *pages, self._table, self._starts, self._lengths, 1, window=window)
