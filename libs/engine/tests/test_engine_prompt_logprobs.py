"""Log probabilities of prompts against transformers: in chunks, on both paths and over ranks, with caches, and never as one matrix."""

from __future__ import annotations

import pytest
import torch
from engine_pair import Pair, legs
from engine_reference import answers, assert_all_free, engine, make_reference, prompts, request, run
from test_engine_device import on_device, plain_twins  # noqa: F401

from baton.engine import load_model
from baton.engine.models.llama import LlamaModel
from baton.engine.prompt_scores import ROWS_AT_ONCE
from baton.engine.types import PromptLogprobs, Token

TOP = 3


def told(events) -> dict[int, list]:
    """By room, from token 1 on; asserts that they come in order, once, and before the first token."""
    found: dict[int, list] = {}
    for event in events:
        if isinstance(event, PromptLogprobs):
            entries = found.setdefault(event.room, [])
            assert event.first == len(entries) + 1
            entries += event.logprobs
        elif isinstance(event, Token) and event.room in found:
            found[event.room] = tuple(found[event.room])  # no more after it
    return {room: list(entries) for room, entries in found.items()}


def assert_theirs(reference, prompt, entries) -> None:
    expected = reference.logits(prompt).log_softmax(dim=-1)
    assert len(entries) == len(prompt) - 1
    for place, entry in enumerate(entries):
        row, token = expected[place], prompt[place + 1]
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == int((row >= row[token]).sum())
        values, tokens = row.topk(TOP)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [9, 512])
@pytest.mark.parametrize("device", [False, True])
def test_they_are_transformers(tiny, budget, device):
    asked = dict(enumerate(prompts([1, 2, 17, 90]), start=1))
    plain = engine(on_device(tiny.folder) if device else tiny.ours, max_num_batched_tokens=budget)
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=3, prompt_logprobs=TOP))
    plain.add(request(9, asked[3], max_tokens=3))
    events = run(plain)
    found = told(events)
    assert sorted(found) == [2, 3, 4], "a prompt of one token has nothing to tell, and who did not ask is told nothing"
    for room, entries in found.items():
        assert_theirs(tiny, asked[room], entries)
    assert answers(events) == {room: tiny.greedy(prompt, 3) for room, prompt in (asked | {9: asked[3]}).items()}
    assert_all_free(plain)


def test_of_a_split_prefill_tells_them_and_decode_does_not_when_it_computes_again(tiny):
    pair = Pair(tiny.ours, 64, 22, growth_tokens=4, max_num_batched_tokens=13)
    asked = dict(enumerate(prompts([20, 21]), start=1))
    for room, prompt in asked.items():
        pair.add(request(room, prompt, max_tokens=30, prompt_logprobs=TOP))
    events = pair.run()
    for room, entries in told(events).items():
        assert_theirs(tiny, asked[room], entries)
    assert pair.decode.stats().extra["retractions"] >= 1
    assert legs(events) == {room: tiny.greedy(prompt, 30) for room, prompt in asked.items()}
    pair.assert_clean()


def test_what_is_cached_is_computed_again_for_them_and_for_nobody_else(tiny):
    pair = Pair(tiny.ours, prefix_cache=True)
    (prompt,) = prompts([33])
    before = 0
    for room, logprobs, computed in ((1, TOP, 33), (2, TOP, 33), (3, None, 1), (4, 0, 33)):
        pair.add(request(room, prompt, max_tokens=2, prompt_logprobs=logprobs))
        events = pair.run()
        assert pair.prefill.stats().extra["computed_tokens"] - before == computed
        before += computed
        if logprobs is None:
            assert told(events) == {}
        elif logprobs:
            assert_theirs(tiny, prompt, told(events)[room])
        else:
            assert [entry.top for entry in told(events)[room]] == [()] * 32
    moved = [page for room, layer, first, count in pair.link.layers_handed_over if layer == 0 and room > 1 for page in range(first, first + count)]
    assert moved == [8, 8, 8], "decode had all whole pages, whatever prefill computed"
    pair.assert_clean()


def test_a_retracted_prompt_is_told_once(tiny):
    """The youngest is retracted while its prompt is computed in small chunks, and goes on where it was."""
    plain = engine(tiny.ours, num_pages=24, growth_tokens=0, max_num_batched_tokens=6, max_running=4)
    asked = dict(enumerate(prompts([30, 31, 20]), start=1))
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=24, prompt_logprobs=TOP))
    events = run(plain)
    for room, entries in told(events).items():
        assert_theirs(tiny, asked[room], entries)
    assert len(told(events)) == 3
    assert plain.stats().extra["retractions"] >= 1
    assert_all_free(plain)


def test_over_two_ranks(tmp_path):
    reference = make_reference(tmp_path, "llama", vocab_size=132, num_key_value_heads=2)
    sharded = load_model(tmp_path, tensor_parallel=2)
    try:
        plain = engine(sharded, max_num_batched_tokens=13)
        (prompt,) = prompts([40])
        plain.add(request(1, prompt, max_tokens=2, prompt_logprobs=TOP))
        assert_theirs(reference, prompt, told(run(plain))[1])
        assert_all_free(plain)
    finally:
        sharded.close()


def test_no_more_than_a_few_rows_of_logits_are_there_at_once(tiny, monkeypatch):
    rows: list[int] = []
    logits = LlamaModel._logits

    def noted(self, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(LlamaModel, "_logits", noted)
    plain = engine(tiny.ours, max_num_batched_tokens=512)
    plain.add(request(1, prompts([200])[0], max_tokens=1, prompt_logprobs=1))
    assert len(told(run(plain))[1]) == 199
    assert sum(rows) == 200
    assert max(rows) <= ROWS_AT_ONCE
