"""Carries out a step's plan: one forward pass, one draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from baton.engine.batch import build_batch
from baton.engine.given_up import GivenUp
from baton.engine.models.llama import LlamaModel
from baton.engine.pool import KVPool
from baton.engine.sampler import Draw, sample
from baton.engine.scheduling.sequence import Sequence, Slice, StepPlan

#: layer_done(layer, ready): the layer's keys and values are in the pool once `ready` (a device event; None: now) has fired.
LayerDone = Callable[[int, object | None], None]


class Flight(Protocol):
    """A launched step."""

    def wait(self, timeout_s: float) -> bool:
        """Whether the step has run; waits for it, at most `timeout_s`."""

    def drawn(self) -> list[int | None]:
        """One token for each slice that samples, in order; None where the logits were not finite. Only after `wait` said True, and not of a step
        that was given up."""


class Runner(Protocol):
    """Launches steps, which run in the order of their launch. All calls come from the engine's thread."""

    #: Steps that may be launched while one is still unread.
    depth: int
    #: Lengths of prompts whose first step costs more than their later ones.
    warm_lengths: tuple[int, ...]
    #: Decode batches and chunks of prompts by how a GPU got them: "replayed" as a captured graph, or "launched" kernel by kernel. Empty on a CPU.
    launches: Counter[str]

    def launch(self, plan: StepPlan, layer_done: LayerDone | None, given_up: GivenUp | None = None) -> Flight:
        """given_up: asked before each layer of prompts, and of decode steps that are not captured; once it says True nothing more is computed.
        The flight's `wait` then tells when what was launched before has run."""

    def release(self, sequence: Sequence) -> None:
        """The sequence is not computed any more, or not for now."""


class Done:
    """A step that ran inside its launch."""

    def __init__(self, drawn: list[int | None]) -> None:
        self._drawn = drawn

    def wait(self, timeout_s: float) -> bool:
        return True

    def drawn(self) -> list[int | None]:
        return self._drawn


class CpuRunner:
    """Computes a step where it stands: nothing is ever in flight."""

    depth: int = 0
    warm_lengths: tuple[int, ...] = (32,)
    launches: Counter[str]

    def __init__(self, model: LlamaModel, pool: KVPool) -> None:
        self._model = model
        self._pool = pool
        self.launches = Counter()

    def launch(self, plan: StepPlan, layer_done: LayerDone | None, given_up: GivenUp | None = None) -> Done:
        tell = None if layer_done is None else lambda layer: layer_done(layer, None)
        logits = self._model.forward(build_batch(plan.slices, self._pool), self._pool, tell, given_up)
        if logits is None:
            return Done([])
        draws = [draw_of(piece) for piece in plan.slices if piece.samples]
        return Done(sample(logits, draws) if draws else [])

    def release(self, sequence: Sequence) -> None:
        """Nothing is kept for a sequence."""


def draw_of(piece: Slice) -> Draw:
    position = piece.start + piece.count
    return Draw(piece.sequence.request.sampling, position, position - piece.sequence.num_prompt)
