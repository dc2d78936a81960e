"""Carries out a step's plan: one forward pass, one draw."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.batch import build_batch
from baton.engine.models.llama import LlamaModel
from baton.engine.pool import KVPool
from baton.engine.sampler import Draw, sample
from baton.engine.scheduling.sequence import StepPlan


class Runner:
    """Binds a model to a pool."""

    def __init__(self, model: LlamaModel, pool: KVPool) -> None:
        self._model = model
        self._pool = pool

    def run(self, plan: StepPlan, layer_done: Callable[[int], None] | None) -> list[int | None]:
        """One token for each slice that samples, in order; None where the logits were not finite."""
        logits = self._model.forward(build_batch(plan.slices, self._pool), self._pool, layer_done)
        draws = []
        for piece in plan.slices:
            if piece.samples:
                sequence = piece.sequence
                draws.append(Draw(sequence.request.sampling, len(sequence.tokens), sequence.num_answered))
        return sample(logits, draws) if draws else []
