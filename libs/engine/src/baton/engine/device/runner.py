"""Launches steps on a device and reads what they drew, one step behind."""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from baton.engine.device.chunk_graphs import SIZES, ChunkGraphs, chunk_sizes
from baton.engine.device.model import DeviceModel
from baton.engine.device.prompts import Prompts
from baton.engine.device.seats import Seats
from baton.engine.device.steps import DecodeSteps
from baton.engine.given_up import GivenUp
from baton.engine.pool import KVPool
from baton.engine.runner import LayerDone
from baton.engine.scheduling.sequence import Sequence, Slice, StepPlan
from baton.engine.types import Role

#: Between two looks at a step that has not run.
LOOK_EVERY_S = 20e-6


def batch_sizes(max_running: int) -> list[int]:
    """Sizes of the captured decode steps: close together where a step is short, 16 apart beyond 64."""
    sizes = {size for size in (1, 2, 4, *range(8, 65, 8), *range(80, max_running, 16)) if size < max_running}
    return sorted({*sizes, max_running})


class DeviceFlight:
    """tokens: on the host once `event` has fired (None: already); `order`: where each slice's token is."""

    def __init__(self, tokens: Tensor | None, order: list[int], event: torch.cuda.Event | None) -> None:
        self._tokens = tokens
        self._order = order
        self._event = event

    def wait(self, timeout_s: float) -> bool:
        if self._event is None or self._event.query():  # type: ignore[no-untyped-call]
            return True
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
            if self._event.query():  # type: ignore[no-untyped-call]
                return True
        return False

    def drawn(self) -> list[int | None]:
        if self._tokens is None:
            return []
        values = self._tokens.tolist()
        return [None if values[place] < 0 else values[place] for place in self._order]


class DeviceRunner:
    """Binds a model to a pool on one device. The next step may be launched while the last one's tokens are still unknown to the host.

    role: a prefill server's sequences leave after their first token and take no seats. max_rows: of chunks in a step. capture: record decode steps
    and short chunks as CUDA graphs.
    """

    depth: int = 1
    #: Kernels are compiled for counts of one, of a multiple of 16 and of any, where chunks are captured and where they are not; the library plans
    #: for each length of long prompts.
    warm_lengths: tuple[int, ...] = (1, 17, 48, SIZES[-1] + 1, SIZES[-1] + 16, 1 << 30)

    def __init__(
        self,
        model: DeviceModel,
        pool: KVPool,
        role: Role,
        max_running: int,
        max_pages: int,
        max_rows: int,
        *,
        deterministic: bool,
        capture: bool,
    ) -> None:
        self._device = model.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        on_graphs = capture and self._stream is not None
        graphs: ChunkGraphs | None = None
        # Not with other ranks: a collective in each of hundreds of graphs has not been tried.
        if capture and model.group is None:
            by_layer = role is Role.PREFILL
            sizes = chunk_sizes(max_rows)
            graphs = ChunkGraphs(model, pool, sizes, max_pages, by_layer=by_layer, deterministic=deterministic, capture=on_graphs)
        self._prompts = Prompts(model, pool, graphs, deterministic=deterministic)
        self._seats: Seats | None = None
        self._steps: DecodeSteps | None = None
        if role is not Role.PREFILL:
            self._seats = Seats(2 * max_running, max_pages, self._device)
            self._steps = DecodeSteps(model, pool, self._seats, batch_sizes(max_running), deterministic=deterministic, capture=on_graphs)
            self._steps.launches = self._prompts.launches
        self.launches = self._prompts.launches
        with self._on_stream():
            if self._steps is not None:
                self._steps.prepare()
            if graphs is not None:
                graphs.prepare()

    def launch(self, plan: StepPlan, layer_done: LayerDone | None, given_up: GivenUp | None = None) -> DeviceFlight:
        with self._on_stream():
            singles: list[Slice] = []
            chunks: list[Slice] = []
            for piece in plan.slices:
                (singles if self._is_step(piece) else chunks).append(piece)
            parts = [self._step(singles)] if singles else []
            if chunks:
                parts += self._chunks(chunks, layer_done, given_up)
            place = {id(piece): index for index, piece in enumerate((*singles, *(each for each in chunks if each.samples)))}
            order = [place[id(piece)] for piece in plan.slices if piece.samples]
            return self._fetch(parts, order)

    def release(self, sequence: Sequence) -> None:
        if self._seats is not None:
            self._seats.release(sequence)

    def _is_step(self, piece: Slice) -> bool:
        return self._seats is not None and piece.count == 1 and piece.samples

    def _step(self, slices: List[Slice]) -> Tensor:
        assert self._seats is not None
        assert self._steps is not None
        newcomers = [(piece.sequence, piece.start) for piece in slices if piece.sequence not in self._seats]
        if newcomers:
            self._seats.take(newcomers)
        self._seats.follow_pages([piece.sequence for piece in slices])
        return self._steps.run([self._seats.of(piece.sequence) for piece in slices])

    def _chunks(self, slices: List[Slice], layer_done: LayerDone | None, given_up: GivenUp | None) -> list[Tensor]:
        tokens = self._prompts.run(slices, None if layer_done is None else lambda layer: layer_done(layer, self._mark()), given_up)
        if tokens is None:
            return []
        if self._seats is not None:
            whole = [piece for piece in slices if piece.samples]
            self._seats.take([(piece.sequence, piece.start + piece.count) for piece in whole])
            self._seats.set_tokens([piece.sequence for piece in whole], tokens)
        return [tokens]

    def _fetch(self, parts: list[Tensor], order: list[int]) -> DeviceFlight:
        if self._stream is None:
            return DeviceFlight(torch.cat(parts) if parts else None, order, None)
        host = None
        if parts:
            host = torch.empty(sum(len(part) for part in parts), dtype=torch.int64, pin_memory=True)
            row = 0
            for part in parts:
                host[row : row + len(part)].copy_(part, non_blocking=True)
                row += len(part)
        return DeviceFlight(host, order, self._mark())

    def _mark(self) -> torch.cuda.Event | None:
        """An event behind everything that was launched so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
