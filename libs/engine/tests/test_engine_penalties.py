"""Penalties, bias and log probabilities: what they are, and that every way to compute an answer gives the same."""

from __future__ import annotations

import math

import pytest
import torch
from engine_reference import answers, assert_all_free, engine, prompts, request, run
from test_engine_device import DEVICE, on_device
from test_engine_sampler import naive_distribution
from test_engine_split import Pair, legs

from baton.engine import SamplingParams
from baton.engine.adjust import adjust
from baton.engine.logprobs import scores, told
from baton.engine.sampler import Draw, sample
from baton.engine.types import Token

#: Strong enough to change most tokens of a small random model's answers.
SETTINGS = {
    "repetition": {"repetition_penalty": 1.6},
    "frequency": {"frequency_penalty": 1.3},
    "presence": {"presence_penalty": -1.7},
    "bias": {"logit_bias": ((3, 4.0), (9, -3.0), (11, 5.0))},
    "all": {"repetition_penalty": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": ((3, 2.0),)},
}


@pytest.fixture(autouse=True)
def plain_twins(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="module")
def on_gpu_path(tiny):
    return on_device(tiny.folder)


def naive_adjusted(logits: torch.Tensor, params: SamplingParams, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The definition, token by token, in float64."""
    changed = logits.double().clone()
    for token in set(prompt + answer):
        changed[token] = changed[token] / params.repetition_penalty if changed[token] > 0 else changed[token] * params.repetition_penalty
    for token in set(answer):
        changed[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    for token, value in params.logit_bias:
        changed[token] += value
    return changed


@pytest.mark.parametrize("name", SETTINGS)
def test_the_definition(name):
    generator = torch.Generator().manual_seed(3)
    for num_prompt, num_answered in ((1, 0), (5, 1), (40, 60)):
        logits = torch.randn(30, generator=generator) * 3
        history = torch.randint(0, 30, (num_prompt + num_answered,), generator=generator)
        params = SamplingParams(**SETTINGS[name])
        expected = naive_adjusted(logits, params, history[:num_prompt].tolist(), history[num_prompt:].tolist())
        changed = logits.clone()
        adjust(changed, params, history, num_answered)
        torch.testing.assert_close(changed.double(), expected, atol=1e-5, rtol=1e-5)


def test_what_is_drawn_follows_the_penalised_distribution():
    params = SamplingParams(temperature=0.9, top_p=0.95, min_p=0.01, **SETTINGS["all"])
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    prompt, answer = [1, 2, 3, 3], [5, 5, 7, 3]
    expected = naive_distribution(naive_adjusted(logits, params, prompt, answer), params)
    num_draws = 6000
    # One place of the answer: the seed makes the draws independent.
    draws = [Draw(SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"seed": seed}), 8, 4, prompt + answer)
             for seed in range(num_draws)]  # fmt: skip
    counts = torch.bincount(torch.tensor(sample(logits.repeat(num_draws, 1), draws)), minlength=40).double()
    assert counts[expected == 0].sum() == 0
    likely = expected * num_draws >= 5
    chi_square = float(((counts - expected * num_draws) ** 2 / (expected * num_draws))[likely].sum())
    freedom = int(likely.sum()) - 1
    assert chi_square <= freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def greedy_by_definition(tiny, prompt: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < num_tokens:
        logits = tiny.logits(prompt + answer)[-1].detach()
        answer.append(int(naive_adjusted(logits, params, prompt, answer).argmax()))
    return answer


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_is_the_definition_over_transformers_logits(tiny, on_gpu_path, name):
    """In every way there is, beside rooms that ask for nothing, with chunks of prompts and with sequences that lose their pages."""
    asked = dict(enumerate(prompts([9, 33, 1, 20], seed=5), start=1))
    params = SamplingParams(**SETTINGS[name])
    expected = {room: tiny.greedy(prompt, 18) if room == 2 else greedy_by_definition(tiny, prompt, params, 18) for room, prompt in asked.items()}
    assert expected[1] != tiny.greedy(asked[1], 18), "the setting must matter"
    requests = [request(room, prompt, max_tokens=18, **({} if room == 2 else SETTINGS[name])) for room, prompt in asked.items()]
    for model in (tiny.ours, on_gpu_path):
        plain = engine(model, max_num_batched_tokens=13)
        for each in requests:
            plain.add(each)
        assert answers(run(plain)) == expected
        assert_all_free(plain)
        if DEVICE.type == "cpu":
            pair = Pair(model, decode_pages=30, growth_tokens=2)
            pair.add(*requests)
            assert legs(pair.run()) == expected
            assert pair.decode.stats().extra["retractions"] >= 1
            pair.assert_clean()


def test_sampled_with_penalties_is_the_same_on_both_paths(tiny, on_gpu_path):
    asked = dict(enumerate(prompts([9, 30, 50, 3] * 5, seed=3), start=1))
    found = []
    for model in (tiny.ours, on_gpu_path):
        plain = engine(model, num_pages=400, max_running=20)
        for room, prompt in asked.items():
            settings = {"temperature": 1.1, "top_p": 0.95, "seed": 7 + room, "min_tokens": 6, "stop_token_ids": frozenset({3, 5, 7})}
            plain.add(request(room, prompt, max_tokens=20, **settings, **list(SETTINGS.values())[room % 5]))
        found.append(answers(run(plain)))
    assert found[0] == found[1]


def test_an_answer_that_goes_on_in_another_room(tiny):
    """What an earlier room drew is prompt there, and is penalised as answer."""
    prompt = prompts([12], seed=8)[0]
    plain = engine(tiny.ours)
    plain.add(request(1, prompt, max_tokens=20, **SETTINGS["all"]))
    whole = answers(run(plain))[1]
    for given in (1, 7, 19):
        plain.add(request(100 + given, prompt + whole[:given], max_tokens=20 - given, answered_tokens=given, **SETTINGS["all"]))
    rest = answers(run(plain))
    assert {room - 100: tokens for room, tokens in rest.items()} == {given: whole[given:] for given in (1, 7, 19)}


def by_place(events) -> dict[tuple[int, int], Token]:
    return {(event.room, event.index): event for event in events if isinstance(event, Token)}


def test_log_probabilities_are_transformers_whatever_is_penalised(tiny, on_gpu_path):
    """The first token's too, which a prefill server draws."""
    asked = dict(enumerate(prompts([9, 33, 1], seed=5), start=1))
    wanted = {1: 5, 2: None, 3: 0}
    requests = [
        request(room, prompt, max_tokens=8, temperature=1.0, seed=room, top_logprobs=wanted[room], frequency_penalty=0.5)
        for room, prompt in asked.items()
    ]
    for model in (tiny.ours, on_gpu_path):
        told_by = []
        plain = engine(model)
        for each in requests:
            plain.add(each)
        told_by.append(by_place(run(plain)))
        if DEVICE.type == "cpu":
            pair = Pair(model)
            pair.add(*requests)
            told_by.append(by_place(pair.run()))
        for events in told_by:
            for (room, index), event in events.items():
                if wanted[room] is None:
                    assert event.logprobs is None
                    continue
                before = [events[room, place].token for place in range(index)]
                expected = tiny.logits(asked[room] + before)[-1].detach().log_softmax(-1)
                assert event.logprobs.logprob == pytest.approx(float(expected[event.token]), abs=1e-4)
                top = expected.topk(wanted[room]) if wanted[room] else None
                assert [token for token, _ in event.logprobs.top] == ([] if top is None else top.indices.tolist())
                assert [value for _, value in event.logprobs.top] == pytest.approx([] if top is None else top.values.tolist(), abs=1e-4)


def test_more_is_asked_than_a_vocabulary_has():
    row = scores(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0]))[0].tolist()
    best = told(row, 20)
    assert [token for token, _ in best.top] == [2, 1, 0]
    assert best.logprob == best.top[2][1]


def test_a_seed_draws_the_same_answer_wherever_and_with_whomever(tiny, on_gpu_path):
    """Alone and in a batch, plain and split, with pages that are lost on the way, on the CPU's path and on the GPU's."""
    asked = {}
    for room, prompt in enumerate(prompts([9, 33, 1, 20, 14, 50], seed=6), start=1):
        some = list(SETTINGS.values())[room % 5] if room % 2 else {}
        asked[room] = request(room, prompt, max_tokens=18, temperature=1.1, top_p=0.97, top_k=60, min_p=0.005, seed=(1 << 63) + room, **some)
    alone = {}
    for each in asked.values():
        one = engine(tiny.ours)
        one.add(each)
        alone |= answers(run(one))
    assert len({tuple(tokens) for tokens in alone.values()}) == len(asked)
    for model in (tiny.ours, on_gpu_path):
        for settings in ({}, {"max_num_batched_tokens": 13}, {"num_pages": 40, "growth_tokens": 2}):
            plain = engine(model, **settings)
            for each in asked.values():
                plain.add(each)
            assert answers(run(plain)) == alone
            assert bool(plain.stats().extra["retractions"]) is ("num_pages" in settings)
        if DEVICE.type == "cpu":
            pair = Pair(model, decode_pages=40, growth_tokens=2)
            pair.add(*asked.values())
            assert legs(pair.run()) == alone
            assert pair.decode.stats().extra["retractions"] >= 1
            pair.assert_clean()
