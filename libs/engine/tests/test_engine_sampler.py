"""Sampling: the right distribution, the same token on every replay."""

from __future__ import annotations

import math

import pytest
import torch

from baton.engine import SamplingParams
from baton.engine.philox import draw_key
from baton.engine.race import arrivals
from baton.engine.sampler import Draw, filtered_probabilities, sample


def naive_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The definition, one step after another, on a sorted copy in float64."""
    probabilities, order = (logits.double() / params.temperature).softmax(-1).sort(descending=True, stable=True)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if params.top_k:
        keep &= probabilities >= probabilities[min(params.top_k, len(probabilities)) - 1]
    kept = probabilities * keep
    if params.top_p < 1:
        mass = (kept / kept.sum()).cumsum(-1)
        last = int((mass < params.top_p).sum())
        keep &= probabilities >= probabilities[min(last, len(probabilities) - 1)]
    if params.min_p:
        keep &= probabilities >= params.min_p * probabilities[0]
    kept = probabilities * keep
    result = torch.zeros_like(probabilities)
    result[order] = kept / kept.sum()
    return result


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=7),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.15),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=2.0, top_k=10_000, top_p=0.999),
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_filters_are_the_definition(params):
    for seed in range(5):
        logits = torch.randn(400, generator=torch.Generator().manual_seed(seed)) * 2.5
        torch.testing.assert_close(filtered_probabilities(logits, params).double(), naive_distribution(logits, params), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_what_is_drawn_follows_the_distribution(params):
    num_draws = 6000
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    expected = naive_distribution(logits, params)
    draws = [Draw(params, position, position) for position in range(num_draws)]
    counts = torch.bincount(torch.tensor(sample(logits.repeat(num_draws, 1), draws)), minlength=40).double()
    assert counts[expected == 0].sum() == 0
    likely = expected * num_draws >= 5
    rest = expected[~likely].sum() * num_draws
    cells = [(float(counts[token]), float(expected[token]) * num_draws) for token in likely.nonzero().flatten().tolist()]
    if rest >= 5:
        cells.append((float(counts[~likely].sum()), float(rest)))
    chi_square = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the 99.9 % point.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert chi_square <= limit


def test_a_draw_does_not_depend_on_its_batch():
    logits = torch.randn(33, 5000, generator=torch.Generator().manual_seed(2))
    draws = [Draw(SETTINGS[row % len(SETTINGS)], 100 + row, row) for row in range(33)]
    together = sample(logits.clone(), draws)
    alone = [sample(logits[row : row + 1].clone(), [draws[row]])[0] for row in range(33)]
    backwards = sample(logits.flip(0).clone(), draws[::-1])[::-1]
    assert together == alone == backwards


def test_a_draw_depends_on_seed_and_position():
    logits = torch.zeros(1, 4096)
    tokens = {
        sample(logits.clone(), [Draw(SamplingParams(temperature=1.0, seed=seed), position, 0)])[0] for seed in range(8) for position in range(8)
    }
    assert len(tokens) > 55


def test_greedy_takes_the_first_of_equal_logits():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 5.0, 5.0]])
    assert sample(logits, [Draw(SamplingParams(), 0, 0)] * 2) == [1, 0]


def test_rows_that_are_not_finite_are_named():
    logits = torch.zeros(3, 8)
    logits[1, 3] = math.nan
    logits[2] = math.inf
    assert sample(logits, [Draw(SamplingParams(temperature=1.0), 0, 0)] * 3)[1:] == [None, None]


def test_stop_tokens_cannot_come_before_min_tokens():
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({1, 99999}))
    logits = torch.tensor([[0.0, 9.0, 5.0]])
    assert [sample(logits.clone(), [Draw(params, 10, index)])[0] for index in range(3)] == [2, 2, 1]


def test_a_token_of_no_weight_is_never_drawn():
    logits = torch.full((64, 49152), -1e4)
    logits[:, 17] = 0.0
    assert set(sample(logits, [Draw(SamplingParams(temperature=1.0), position, 0) for position in range(64)])) == {17}


def test_what_rounding_changes_in_logits_does_not_change_what_is_drawn():
    """As another batch or another server computes them. With the inverse of a cumulative distribution several in a hundred are other tokens."""
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(400, 49152, generator=generator)
    draws = [Draw(SamplingParams(temperature=1.0, seed=row), 10, 10) for row in range(400)]
    nearly = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=generator))
    assert sum(a != b for a, b in zip(sample(nearly, draws), sample(logits, draws), strict=True)) <= 1


def test_arrivals_are_exponential_and_independent():
    times = torch.stack([arrivals(draw_key(seed, 3), 20_000) for seed in range(50)])
    assert times.min() > 0
    counts = torch.histc(torch.exp(-times.double()), bins=100, min=0, max=1)
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 149.4, "99 degrees of freedom, p = 0.001"
    small = (times < 1e-4).double().mean()
    assert abs(float(small) - 1e-4) < 5e-5
    centred = (times - times.mean()).double()
    for shift in (1, 2, 16, 256):
        between_tokens = float((centred[:, :-shift] * centred[:, shift:]).mean())
        assert abs(between_tokens) < 0.005, shift
    assert abs(float((centred[:-1] * centred[1:]).mean())) < 0.005
