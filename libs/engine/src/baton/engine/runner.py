"""Carries out a step's plan: one forward pass, one draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.batch import build_batch
from baton.engine.given_up import GivenUp
from baton.engine.logprobs import scores, told
from baton.engine.models.llama import LlamaModel
from baton.engine.pool import KVPool
from baton.engine.prompt_scores import Also, scored_of
from baton.engine.sampler import Draw, sample
from baton.engine.scheduling.sequence import Sequence, Slice, StepPlan
from baton.engine.types import Logprobs

#: layer_done(layer, ready): the layer's keys and values are in the pool once `ready` (a device event; None: now) has fired.
LayerDone = Callable[[int, object | None], None]


class Flight(Protocol):
    """A launched step."""

    def wait(self, timeout_s: float) -> bool:
        """Whether the step has run; waits for it, at most `timeout_s`."""

    def drawn(self) -> list[int | None]:
        """One token for each slice that samples, in order; None where the logits were not finite. Only after `wait` said True, and not of a step
        that was given up."""

    def logprobs(self) -> dict[int, Logprobs]:
        """Of those of `drawn` whose requests asked for them, by their place in it. Under the same conditions."""

    def scored(self) -> list[tuple[Slice, list[Logprobs]]]:
        """Of prompts' own tokens, by slice, where they are asked for. Under the same conditions."""

    def idle_s(self) -> float | None:
        """Seconds that the device stood still between the decode step launched before this one and this one, whether or not it had work. None: it is
        none, or runs on a CPU, or prompts were computed between them. Only after `wait` said True."""


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

    def __init__(self, drawn: list[int | None], logprobs: dict[int, Logprobs] | None = None) -> None:
        self._drawn = drawn
        self._scored: list[tuple[Slice, list[Logprobs]]] = []
        self._logprobs = logprobs or {}

    def of_prompts(self, scored: list[tuple[Slice, list[Logprobs]]]) -> None:
        self._scored = scored

    def wait(self, timeout_s: float) -> bool:
        return True

    def drawn(self) -> list[int | None]:
        return self._drawn

    def logprobs(self) -> dict[int, Logprobs]:
        return self._logprobs

    def scored(self) -> list[tuple[Slice, list[Logprobs]]]:
        return self._scored

    def idle_s(self) -> float | None:
        return None


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
        self._pool.copy_pages(plan.copies)
        scored, scores = scored_of(plan.slices), []
        also: Also | None = None if scored is None else lambda hidden, head: scores.append(scored.scores(hidden, head))
        logits = self._model.forward(build_batch(plan.slices, self._pool), self._pool, tell, given_up, also)
        if logits is None:
            return Done([])
        draws = [draw_of(piece) for piece in plan.slices if piece.samples]
        done = _drawn(logits, draws) if draws else Done([])
        if scored is not None:
            done.of_prompts(scored.told(scores[0]))
        return done

    def release(self, sequence: Sequence) -> None:
        """Nothing is kept for a sequence."""


@torch.inference_mode()
def _drawn(logits: Tensor, draws: list[Draw]) -> Done:
    asked = [place for place, draw in enumerate(draws) if draw.params.top_logprobs is not None]
    as_given = logits[asked] if asked else None
    drawn = sample(logits, draws)
    if as_given is None:
        return Done(drawn)
    rows = scores(as_given, torch.tensor([drawn[place] or 0 for place in asked])).tolist()
    return Done(drawn, {place: told(row, draws[place].params.top_logprobs or 0) for place, row in zip(asked, rows, strict=True)})


def draw_of(piece: Slice) -> Draw:
    position, sampling = piece.start + piece.count, piece.sequence.request.sampling
    history = piece.sequence.tokens[:position] if sampling.penalises else ()
    return Draw(sampling, position, position - piece.sequence.num_prompt, history)
