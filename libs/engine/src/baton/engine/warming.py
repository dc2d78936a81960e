"""Steps that nobody asked for, before the first that somebody did."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.layout import KVLayout
from baton.engine.page_table import PageTable
from baton.engine.runner import Runner
from baton.engine.scheduling.sequence import Sequence, Slice, StepPlan
from baton.engine.types import Extent, Request, Role, SamplingParams


def run_unasked(runner: Runner, role: Role, layout: KVLayout, longest: int) -> None:
    """A prompt of each of the runner's `warm_lengths`, up to `longest` tokens, and a decode step after it where the role has any.

    One more prompt asks for all that few do. Their keys and values go to the pool's first pages, whoever those belong to.
    """
    usual = SamplingParams(max_tokens=2)
    rare = replace(usual, repetition_penalty=1.1, presence_penalty=0.1, logit_bias=((0, 0.1),), top_logprobs=1)
    for wanted, sampling in (*((length, usual) for length in runner.warm_lengths), (runner.warm_lengths[0], rare)):
        length = max(1, min(wanted, longest))
        pages = PageTable()
        pages.append(Extent(0, layout.pages_for(length + 1)))
        sequence = Sequence(Request(0, [0] * length, sampling), [0] * length, pages=pages)
        _run(runner, Slice(sequence, 0, length, samples=True))
        if role is not Role.PREFILL:
            _run(runner, Slice(sequence, length, 1, samples=True))
        runner.release(sequence)


def _run(runner: Runner, piece: Slice) -> None:
    piece.sequence.launch(piece.count, piece.samples)
    flight = runner.launch(StepPlan((piece,)), None)
    while not flight.wait(1.0):
        pass
    piece.sequence.land(piece.samples)
    piece.sequence.tokens.append(0)
