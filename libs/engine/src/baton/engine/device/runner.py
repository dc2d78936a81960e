"""Launches steps on a device and reads what they drew, one step behind."""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from baton.engine.device.chunk_graphs import SIZES, ChunkGraphs, chunk_sizes
from baton.engine.device.extras import Extra, Part, part
from baton.engine.device.model import DeviceModel
from baton.engine.device.prompts import Prompts
from baton.engine.device.seated import Seated, seated_of
from baton.engine.device.seats import TOKEN, Seats
from baton.engine.device.steps import DecodeSteps
from baton.engine.given_up import GivenUp
from baton.engine.logprobs import told
from baton.engine.pool import KVPool
from baton.engine.prompt_scores import Also, Scored, scored_of
from baton.engine.runner import LayerDone
from baton.engine.scheduling.sequence import Sequence, Slice, StepPlan
from baton.engine.types import Logprobs, Role

#: Logits that are adjusted are copied as float32: so many rows of them at a time.
ROWS_AT_ONCE = 16
#: Two moments on the device.
Gap = tuple[torch.cuda.Event, torch.cuda.Event]
#: Between two looks at a step that has not run.
LOOK_EVERY_S = 20e-6


def batch_sizes(max_running: int) -> list[int]:
    """Sizes of the captured decode steps: close together where a step is short, 16 apart beyond 64."""
    sizes = {size for size in (1, 2, 4, *range(8, 65, 8), *range(80, max_running, 16)) if size < max_running}
    return sorted({*sizes, max_running})


class DeviceFlight:
    """tokens: on the host once `event` has fired (None: already); `order`: where each slice's token is (None: they are in the slices' order).
    scored: (place among the tokens, how many of the most probable) and all their scores, on the host as well. prompts: whose own tokens were scored.
    gap: when the decode step before ended, and when this one began."""

    def __init__(
        self,
        tokens: Tensor | None,
        order: list[int] | None,
        event: torch.cuda.Event | None,
        asked: list[tuple[int, int]],
        scores: Tensor | None,
        gap: Gap | None,
        prompts: Scored | None = None,
        prompt_scores: Tensor | None = None,
    ) -> None:
        self._tokens = tokens
        self._order = order
        self._event = event
        self._asked = asked
        self._scores = scores
        self._gap = gap
        self._prompts = prompts
        self._prompt_scores = prompt_scores

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
        values: list[int] = self._tokens.tolist()
        if self._order is not None:
            values = [values[place] for place in self._order]
        return values if min(values, default=0) >= 0 else [None if token < 0 else token for token in values]  # type: ignore[return-value]

    def logprobs(self) -> dict[int, Logprobs]:
        if self._scores is None:
            return {}
        known = {place: told(row, num_top) for (place, num_top), row in zip(self._asked, self._scores.tolist(), strict=True)}
        return known if self._order is None else {index: known[place] for index, place in enumerate(self._order) if place in known}

    def scored(self) -> list[tuple[Slice, list[Logprobs]]]:
        return [] if self._prompts is None or self._prompt_scores is None else self._prompts.told(self._prompt_scores)

    def idle_s(self) -> float | None:
        if self._gap is None:
            return None
        ended, began = self._gap
        return float(ended.elapsed_time(began)) / 1e3


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
        self._pool = pool
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
        self._rows: Seated | None = None
        self._gap: Gap | None = None
        self._ended: torch.cuda.Event | None = None
        with self._on_stream():
            if self._steps is not None:
                self._steps.prepare()
            if graphs is not None:
                graphs.prepare()

    def launch(self, plan: StepPlan, layer_done: LayerDone | None, given_up: GivenUp | None = None) -> DeviceFlight:
        with self._on_stream():
            self._pool.copy_pages(plan.copies)
            self._gap = None
            slices = plan.slices
            if plan.decodes_only and self._seats is not None:
                return self._fetch([self._step(slices)], None, None, [])
            singles = [piece for piece in slices if piece.count == 1 and piece.samples] if self._seats is not None else []
            parts = [self._step(singles)] if singles else []
            if len(singles) == len(slices):
                return self._fetch(parts, list(range(len(singles))), None, [])
            chunks = [piece for piece in slices if piece.count != 1 or not piece.samples] if singles else slices
            prompts, scores = scored_of(chunks), []
            if chunks:
                also: Also | None = None if prompts is None else lambda hidden, head: scores.append(prompts.scores(hidden, head))
                parts += self._chunks(chunks, layer_done, given_up, also)
                self._ended = None
            place = {id(piece): index for index, piece in enumerate((*singles, *(each for each in chunks if each.samples)))}
            order = [place[id(piece)] for piece in slices if piece.samples]
            return self._fetch(parts, order, prompts, scores)

    def release(self, sequence: Sequence) -> None:
        if self._seats is not None:
            self._seats.release(sequence)

    def _seated(self, seats: Seats, slices: List[Slice]) -> Seated:
        """The rows of a step, who have seats from now on: most steps have the rows of the one before."""
        sequences = [piece.sequence for piece in slices]
        if self._rows is None or self._rows.version != seats.version or self._rows.sequences != sequences:
            newcomers = [(piece.sequence, piece.start) for piece in slices if piece.sequence not in seats]
            if newcomers:
                seats.take(newcomers)
            self._rows = seated_of(seats, sequences)
        return self._rows

    def _step(self, slices: List[Slice]) -> Part:
        assert self._seats is not None
        assert self._steps is not None
        rows = self._seated(self._seats, slices)
        self._seats.follow_pages(rows.sequences)
        adjusted = [(row, slices[row], extra) for row, extra in rows.extras]
        for row, piece, extra in adjusted:
            extra.follow(piece, self._seats.wide[TOKEN, rows.seats[row]])
        began = self._moment()
        self._gap = None if began is None or self._ended is None else (self._ended, began)
        tokens = self._steps.run(rows.seats)
        self._ended = self._moment()
        for first in range(0, len(adjusted), ROWS_AT_ONCE):
            some = adjusted[first : first + ROWS_AT_ONCE]
            self._steps.redraw([row for row, _, _ in some], partial(_adjust, some))
        asked = rows.asked
        return part(tokens, asked, self._steps.logits([row for row, _ in asked]) if asked else None)

    def _chunks(self, slices: List[Slice], layer_done: LayerDone | None, given_up: GivenUp | None, also: Also | None) -> list[Part]:
        drawn = self._prompts.run(slices, None if layer_done is None else lambda layer: layer_done(layer, self._mark()), given_up, also)
        if drawn is None:
            return []
        if self._seats is not None:
            whole = [piece for piece in slices if piece.samples]
            self._seats.take([(piece.sequence, piece.start + piece.count) for piece in whole])
            self._seats.set_tokens([piece.sequence for piece in whole], drawn.tokens)
        return [drawn]

    def _fetch(self, parts: list[Part], order: list[int] | None, prompts: Scored | None, of_prompts: list[Tensor]) -> DeviceFlight:
        asked: list[tuple[int, int]] = []
        before = 0
        for each in parts:
            asked += [(before + row, num_top) for row, num_top in each.asked]
            before += len(each.tokens)
        tokens = self._to_host([each.tokens for each in parts])
        scores = self._to_host([each.scores for each in parts if each.scores is not None])
        prompt_scores = self._to_host(of_prompts)
        return DeviceFlight(tokens, order, self._mark(), asked, scores, self._gap, prompts, prompt_scores)

    def _to_host(self, parts: list[Tensor]) -> Tensor | None:
        """All of `parts`, one behind the other, on the host once what was launched so far has run; None: there are none."""
        if not parts:
            return None
        if self._stream is None:
            return torch.cat(parts)
        host = torch.empty(sum(len(each) for each in parts), *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=True)
        row = 0
        for each in parts:
            host[row : row + len(each)].copy_(each, non_blocking=True)
            row += len(each)
        return host

    def _mark(self) -> torch.cuda.Event | None:
        """An event behind everything that was launched so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _moment(self) -> torch.cuda.Event | None:
        """The same, for the time between two."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _adjust(pieces: List[tuple[int, Slice, Extra]], place: int, logits: Tensor) -> None:
    _, piece, extra = pieces[place]
    extra.adjust(logits, piece)
