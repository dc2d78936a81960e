"""Decode steps beside transformers, teacher-forced: what a step's logits are, through the paged cache that its own prompt and steps have filled.

With BATON_ENGINE_DEVICE=cuda:0 the steps are replayed graphs.
"""

from __future__ import annotations

import pytest
import torch
from engine_reference import FAMILIES, make_reference, prompts
from test_engine_device import DEVICE, EXTRA, on_device

from baton.engine import EngineConfig, Request, Role, SamplingParams, plan_layout
from baton.engine.device.model import DeviceModel
from baton.engine.device.runner import DeviceRunner
from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool
from baton.engine.scheduling.sequence import Sequence, Slice, StepPlan
from baton.engine.types import Extent

PAGE_SIZE, NUM_STEPS, CONTEXT = 4, 16, 64
#: None is a multiple of the page; answers of 16 tokens cross pages at every place.
LENGTHS = (5, 19, 30, 41, 6)


@pytest.fixture(autouse=True)
def plain_twins(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class Forced:
    """Texts of which all tokens are known, computed by a runner: prompts as chunks, then step after step with the text's own token."""

    def __init__(self, model: DeviceModel, texts: list[list[int]], deterministic: bool) -> None:
        pages = -(-CONTEXT // PAGE_SIZE)
        settings = EngineConfig(num_pages=pages * len(texts) + 5, page_size=PAGE_SIZE, dtype=str(model.dtype).removeprefix("torch."))
        pool = KVPool(plan_layout(model.config, settings), model.dtype, device=DEVICE)
        with torch.inference_mode():
            pool.planes.fill_(float("nan"))
        # One seat more than texts in a step: the batch is padded.
        self._runner = DeviceRunner(model, pool, Role.PLAIN, len(texts) + 2, pages, 256, deterministic=deterministic, capture=True)
        self._texts = texts
        self._sequences = []
        for index, text in enumerate(texts):
            table = PageTable()
            # In two extents, the later pages first in the pool.
            table.append(Extent(5 + pages * index + pages // 2, pages - pages // 2))
            table.append(Extent(5 + pages * index, pages // 2))
            prompt = text[:-NUM_STEPS]
            self._sequences.append(Sequence(Request(index + 1, prompt, SamplingParams(max_tokens=NUM_STEPS + 1)), list(prompt), pages=table))

    def _launch(self, counts: list[int]) -> list[int | None]:
        slices = [Slice(each, each.num_computed, count, samples=True) for each, count in zip(self._sequences, counts, strict=True)]
        for piece in slices:
            piece.sequence.launch(piece.count, piece.samples)
        flight = self._runner.launch(StepPlan(tuple(slices)), None)
        while not flight.wait(1.0):
            pass
        for piece in slices:
            piece.sequence.land(piece.samples)
        return flight.drawn()

    @torch.inference_mode()
    def logits(self) -> list[torch.Tensor]:
        """[steps, vocabulary] float32 of each text, on the CPU. Asserts that each step drew the largest."""
        runner, found = self._runner, []
        assert runner._seats is not None
        assert runner._steps is not None
        self._launch([len(each.tokens) for each in self._sequences])
        runner.launches.clear()
        for step in range(NUM_STEPS):
            token_ids = [text[step - NUM_STEPS] for text in self._texts]
            for sequence, token in zip(self._sequences, token_ids, strict=True):
                sequence.tokens.append(token)
            with runner._on_stream():
                runner._seats.set_tokens(self._sequences, torch.tensor(token_ids, device=DEVICE))
            drawn = self._launch([1] * len(self._sequences))
            with runner._on_stream():
                found.append(runner._steps.logits(range(len(self._sequences))).float().cpu())
            assert drawn == found[-1].argmax(dim=1).tolist()
        assert runner.launches == {"replayed" if DEVICE.type == "cuda" else "launched": NUM_STEPS}
        return list(torch.stack(found, dim=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_those_of_transformers(tmp_path, family):
    """The relative root mean square error of each step's logits, in a batch of few, one of many, and in the deterministic mode. float32: rounding
    only, 2e-5 in every step. bfloat16: transformers' float32 is as near as to its own bfloat16, within a quarter in the middle, within a half at
    the 95th percentile of a dense model; of experts near ties go elsewhere, so only the middle is told."""
    reference = make_reference(tmp_path, family, **EXTRA.get(family, {}))
    texts = prompts([length + NUM_STEPS for length in LENGTHS * 4], seed=5)
    exact = [reference.logits(text)[-NUM_STEPS:] for text in texts]

    def errors(found: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(found, exact, strict=False)
        return torch.cat([(got - want).square().mean(dim=1) / want.square().mean(dim=1) for got, want in pairs]).sqrt()

    model = on_device(tmp_path)
    assert errors(Forced(model, texts[: len(LENGTHS)], False).logits()).max() <= 2e-5
    model = on_device(tmp_path, torch.bfloat16)
    reference.theirs.to(torch.bfloat16)
    theirs = errors([reference.logits(text)[-NUM_STEPS:] for text in texts])
    for count, deterministic in ((len(LENGTHS), False), (len(texts), False), (len(texts), True)):
        ours = errors(Forced(model, texts[:count], deterministic).logits())
        usual = theirs[: len(ours)]
        assert ours.median() <= 1.25 * usual.median()
        if model.config.moe is None:
            assert ours.quantile(0.95) <= 1.5 * usual.quantile(0.95)
