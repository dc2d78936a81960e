"""Makes what grammars rule out for a step, while the step's forward pass runs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from baton.engine.grammar import Constraint
from baton.engine.scheduling.sequence import StepPlan

#: A mask takes some 50 µs, and most of that without the interpreter's lock.
MAX_THREADS = 4


class Masks:
    """Owns its threads, which begin with the first step that needs them; `close` ends them."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 1))

    def begin(self, plan: StepPlan) -> None:
        """Before the plan is launched; returns at once. Only sequences that are held to a grammar and draw a token cost anything."""
        asked: list[Constraint] = []
        for piece in [each for each in plan.slices if not each.sequence.runs_ahead and each.samples]:
            sequence = piece.sequence
            sampling = sequence.request.sampling
            if sampling.grammar is not None:
                sampling.grammar.begin(sequence.tokens, sequence.num_prompt - sampling.answered_tokens)
                asked.append(sampling.grammar)
        if not asked:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="grammar-masks")
        for first in range(min(self._num_threads, len(asked))):
            some = asked[first :: self._num_threads]
            made = self._threads.submit(_make, some)
            for constraint in some:
                constraint.made_by(made)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()


def _make(constraints: list[Constraint]) -> None:
    for constraint in constraints:
        constraint.make()
