"""Short chunks of prompts as captured graphs: what the host takes to launch a layer kernel by kernel is then longer than the device to compute it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from baton.engine.device.chunk import Chunk
from baton.engine.device.model import DeviceModel, Rows
from baton.engine.device.products import Mode
from baton.engine.device.steps import PagedRows
from baton.engine.device.upload import upload
from baton.engine.given_up import GivenUp
from baton.engine.pool import KVPool
from baton.kernels import prefill_attention

#: Sequences that a captured chunk has places for.
MAX_SEQUENCES = 16
#: Rows of captured chunks. Seen for 36 layers on an H200: the host takes 13 to 30 ms, the device 12 for 512 rows and 25 for 1,024.
SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


def chunk_sizes(max_num_batched_tokens: int) -> list[int]:
    """Of SIZES those that a step may need."""
    return [size for before, size in zip((0, *SIZES), SIZES, strict=False) if before < max_num_batched_tokens]


class ChunkGraphs:
    """Runs chunks of up to `sizes[-1]` rows, padded to the next of `sizes`.

    by_layer: a graph ends where a layer's keys and values are in the pool, so that something may be recorded between two layers. Otherwise there
    are two graphs: what every chunk computes, and what only one computes that draws a token. capture: False runs the same launches one by one.
    """

    def __init__(
        self, model: DeviceModel, pool: KVPool, sizes: List[int], max_pages: int, *, by_layer: bool, deterministic: bool, capture: bool
    ) -> None:
        self._model = model
        self._pool = pool
        self._sizes = sorted(sizes)
        self._mode = Mode.INVARIANT if deterministic else Mode.MANY
        self._capture = capture
        last = model.config.num_layers - 1
        self._ends = set(range(last + 1)) if by_layer else {last}
        self._last = last
        device = model.device
        # Of a size: tokens, positions, slots, then the rows that draw and which sequence each belongs to.
        self._wide = torch.zeros(3 * self._sizes[-1] + 2 * MAX_SEQUENCES, dtype=torch.int64, device=device)
        self._starts = torch.zeros(MAX_SEQUENCES + 1, dtype=torch.int32, device=device)
        # The last place belongs to no sequence: what is drawn for padding looks at it.
        self._lengths = torch.zeros(MAX_SEQUENCES + 1, dtype=torch.int32, device=device)
        self._table = torch.zeros(MAX_SEQUENCES + 1, max_pages, dtype=torch.int32, device=device)
        self._one_each = torch.arange(MAX_SEQUENCES + 1, dtype=torch.int32, device=device) if deterministic else None
        self._graphs: dict[int, list[tuple[int, torch.cuda.CUDAGraph]]] = {}
        self._logits: dict[int, Tensor] = {}
        self.launches: Counter[str] = Counter()

    def takes(self, chunk: Chunk) -> bool:
        return chunk.num_rows <= self._sizes[-1] and len(chunk.lengths) <= MAX_SEQUENCES

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures every size, the largest first, so that the smaller ones reuse its memory. Must run on the stream that will replay."""
        if not self._capture:
            return
        memory: Any = None
        for size in reversed(self._sizes):
            self._put(size, Chunk())
            self._compute(size, None, None, draws=True)  # compiles kernels and makes the libraries' workspaces
            torch.cuda.synchronize()
            recording = Recording(self._ends, memory)
            with recording:
                logits = self._compute(size, recording.cut, None, draws=True)
            assert logits is not None
            memory = recording.graphs[0][1].pool()
            self._graphs[size], self._logits[size] = recording.graphs, logits

    @torch.inference_mode()
    def run(self, chunk: Chunk, layer_done: Callable[[int], None] | None, given_up: GivenUp | None) -> Tensor | None:
        """[samples, vocabulary] in the model's dtype; None when nothing is drawn, and when it was given up. The next run overwrites it."""
        size = next(size for size in self._sizes if size >= chunk.num_rows)
        self._put(size, chunk)
        self.launches["replayed" if size in self._graphs else "launched"] += 1
        launch = self._replay if size in self._graphs else self._compute
        logits = launch(size, layer_done, given_up, bool(chunk.sampled))
        return None if logits is None or not chunk.sampled else logits[: len(chunk.sampled)]

    def _replay(self, size: int, layer_done: Callable[[int], None] | None, given_up: GivenUp | None, draws: bool) -> Tensor | None:
        layer = 0
        for end, graph in self._graphs[size]:
            if end > self._last:
                if draws:
                    graph.replay()
                break
            if given_up is not None and given_up(layer):
                return None
            graph.replay()
            if layer_done is not None:
                layer_done(end)
            layer = end + 1
        return self._logits[size]

    def _put(self, size: int, chunk: Chunk) -> None:
        device, pad = self._wide.device, size - chunk.num_rows
        spare = MAX_SEQUENCES - len(chunk.sampled)
        wide = (
            chunk.tokens + [0] * pad + chunk.positions + [0] * pad + chunk.slots + [-1] * pad
            + chunk.sampled + [0] * spare + chunk.whole + [MAX_SEQUENCES] * spare
        )  # fmt: skip
        self._wide[: len(wide)].copy_(upload(wide, torch.int64, device))
        rest = MAX_SEQUENCES - len(chunk.lengths)
        self._starts.copy_(upload(chunk.starts + [chunk.num_rows] * rest, torch.int32, device))
        self._lengths[:MAX_SEQUENCES].copy_(upload(chunk.lengths + [0] * rest, torch.int32, device))
        if chunk.pages:
            table = upload(chunk.table(), torch.int32, device)
            self._table[: table.shape[0], : table.shape[1]].copy_(table)

    def _compute(self, size: int, layer_done: Callable[[int], None] | None, given_up: GivenUp | None, draws: bool) -> Tensor | None:
        tokens, positions, slots = self._wide[: 3 * size].view(3, size).unbind(0)
        sampled, whole = self._wide[3 * size : 3 * size + 2 * MAX_SEQUENCES].view(2, MAX_SEQUENCES).unbind(0)
        attention = StaticAttention(self._table, self._starts, self._lengths, whole, size, self._one_each)
        rows = Rows(tokens, positions, slots, sampled if draws else sampled[:0])
        return self._model.forward(rows, self._pool, attention, self._mode, layer_done, given_up)


class StaticAttention:
    """Attention over pages, of MAX_SEQUENCES sequences of which some have no rows: table [sequences + 1, pages], starts [sequences + 1],
    lengths [sequences + 1], all int32; whole [samples] int64: which sequence each row that draws belongs to. Rows of padding attend to nothing
    and get 0."""

    def __init__(self, table: Tensor, starts: Tensor, lengths: Tensor, whole: Tensor, longest: int, one_each: Tensor | None) -> None:
        self._table = table
        self._starts = starts
        self._lengths = lengths
        self._whole = whole
        self._longest = longest
        self._one_each = one_each

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        table, lengths = self._table[:-1], self._lengths[:-1]
        return prefill_attention(query, *pages, table, self._starts, lengths, self._longest, window=window, out=torch.zeros_like(query))

    def of_sampled(self, query: Tensor, pages: tuple[Tensor, Tensor], window: int) -> Tensor:
        rows = PagedRows(self._table[self._whole], self._lengths[self._whole], self._one_each)
        return rows.of_sampled(query, pages, window)


class Recording:
    """Captures what is launched inside as one graph after another: a new one begins behind each layer of `ends`.

    graphs: (the layer behind which it ends, graph), in order; the last ends behind no layer and has the number after the last one's. They share
    `memory`, a pool of an earlier recording, or one of their own: they must be replayed in their order.
    """

    def __init__(self, ends: set[int], memory: Any) -> None:
        self.graphs: list[tuple[int, torch.cuda.CUDAGraph]] = []
        self._ends = ends
        self._memory = memory

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._end(max(self._ends) + 1)
        else:
            with suppress(RuntimeError):  # what broke the capture is what is told
                self._graph.capture_end()

    def cut(self, layer: int) -> None:
        if layer in self._ends:
            self._end(layer)
            self._begin()

    def _begin(self) -> None:
        # Not torch.cuda.graph: that collects garbage each time, and there are hundreds of these.
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._memory)

    def _end(self, layer: int) -> None:
        self._graph.capture_end()
        self._memory = self._graph.pool()
        self.graphs.append((layer, self._graph))
