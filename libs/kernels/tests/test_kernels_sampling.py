"""Draws on the device against the naive twin, and that against what it stands for."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, random, strided

from baton.kernels import naive_arrivals, naive_draw_key, naive_sample, sample

# (vocabulary, temperature, top_k, top_p, min_p)
FILTERS = [
    (50, 1.0, 0, 1.0, 0.0),
    (1000, 0.7, 5, 1.0, 0.0),
    (1000, 1.3, 0, 0.8, 0.0),
    (1000, 1.0, 0, 1.0, 0.2),
    (4200, 2.0, 100, 0.9, 0.01),
    (9000, 1.0, 1, 1.0, 0.0),
    (300, 1.0, 300, 0.0, 0.0),
    (9000, 40.0, 0, 0.97, 0.0),  # all about as probable
    (9000, 40.0, 8999, 0.999, 0.0),
    (4200, 0.02, 3000, 1.0, 0.0),  # what is kept lies further from the largest than any mark
]


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3):
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(DEVICE)
    return (
        *(torch.full((rows,), value, dtype=dtype, device=DEVICE) for value, dtype in ((temperature, torch.float32), (top_k, torch.int32))),
        *(torch.full((rows,), value, dtype=torch.float32, device=DEVICE) for value in (top_p, min_p)),
        seeds,
        torch.randint(0, 2**40, (rows,), generator=generator).to(DEVICE),
    )


@pytest.mark.parametrize(("case", "dtype"), [*((case, torch.float32) for case in FILTERS), (FILTERS[4], torch.float16)], ids=str)
def test_draws_are_those_of_the_naive_twin(case, dtype):
    vocab_size, *filters = case
    rows = 4 if DEVICE == "cpu" else 200
    logits = strided(3 * random(rows, vocab_size, dtype=dtype))
    drawn, expected = sample(logits, *settings(rows, *filters)), naive_sample(logits, *settings(rows, *filters))
    # Two tokens may arrive within rounding of one another: with so few rows that is next to impossible.
    assert (drawn == expected).float().mean() >= (1 if DEVICE == "cpu" else 0.99)
    assert case[1] < 0.1 or case[2] == 1 or case[3] == 0 or drawn.unique().numel() > 1


def test_greedy_takes_the_lowest_of_equals_and_refuses_what_is_not_finite():
    logits = random(6, 5000, dtype=torch.float32)
    logits[0, [4200, 17, 4999]] = 9.0
    logits[1, 4500] = float("nan")
    logits[2, 4500] = float("inf")
    logits[3] = float("-inf")
    logits[4, :4990] = float("-inf")
    for temperature in (0.0, 1.0):
        drawn = sample(logits.clone(), *settings(6, temperature))
        assert drawn[1:4].tolist() == [-1, -1, -1]
        assert torch.equal(drawn, naive_sample(logits.clone(), *settings(6, temperature)))
        assert temperature or drawn[0] == 17
        assert drawn[4] >= 4990


def test_rows_of_all_kinds_in_one_batch_and_alone():
    logits = 3 * random(5, 2000, dtype=torch.float32)
    kinds = [settings(1, *each, seed=row) for row, each in enumerate([(0.0,), (1.0,), (1.0, 7), (0.5, 0, 0.6), (2.0, 50, 0.9, 0.1)])]
    together = sample(logits.clone(), *(torch.cat(each) for each in zip(*kinds, strict=True)))
    for row, kind in enumerate(kinds):
        assert sample(logits[row : row + 1].clone(), *kind).item() == together[row]


def test_forbidden_tokens_are_never_drawn():
    logits = random(4, 300, dtype=torch.float32)
    forbidden = torch.full((4, 3), -1, dtype=torch.int32, device=DEVICE)
    forbidden[0, :2] = logits[0].topk(2).indices
    forbidden[2, 2] = logits[2].argmax()
    forbidden[3, 0] = 300  # not of this vocabulary
    best = logits.sort(dim=-1, descending=True).indices
    ours, theirs = logits.clone(), logits.clone()
    drawn = sample(ours, *settings(4, 0.0), forbidden)
    assert drawn.tolist() == [best[0, 2], best[1, 0], best[2, 1], best[3, 0]]
    assert torch.equal(drawn, naive_sample(theirs, *settings(4, 0.0), forbidden))
    # The logits are given back as they were.
    assert torch.equal(ours, logits)
    assert torch.equal(theirs, logits)


@pytest.mark.parametrize(
    ("row", "filters", "kept"),
    [([3, 2, 2, 2, 0], {"top_k": 2}, {0, 1, 2, 3}), ([3, 2, 2, 2, 0], {"top_p": 0.6}, {0, 1, 2, 3}), ([2, 3, 2, 3, 0], {"min_p": 1.0}, {1, 3})],
    ids=str,
)
def test_equals_at_the_edge_of_a_filter_are_all_kept(row, filters, kept):
    logits = torch.tensor([row], dtype=torch.float32, device=DEVICE)
    rows = 4 if DEVICE == "cpu" else 64
    drawn = naive_sample(logits.repeat(64, 1), *settings(64, **filters))
    assert set(drawn.tolist()) == kept
    chosen = [each[:rows] for each in settings(64, **filters)]
    assert torch.equal(sample(logits.repeat(rows, 1), *chosen), drawn[:rows])


def test_draws_follow_the_distribution():
    logits = torch.tensor([[1.0, 0.0, 2.0]], device=DEVICE).repeat(4000, 1)
    drawn = naive_sample(logits, *settings(4000, 1.0))
    shares = torch.stack([(drawn == token).float().mean() for token in range(3)])
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.03, rtol=0)


def test_random_numbers_are_philox():
    # Salmon et al.'s known answer for counter and key 0: words 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
    zero = torch.zeros(1, dtype=torch.int64)
    assert [word.item() for word in naive_draw_key(zero, zero)] == [0x6627E8D5, 0xE169C58D]


def test_arrivals_are_exponential():
    times = naive_arrivals(torch.arange(20), torch.full((20,), 7), 20_000)
    assert times.min() > 0
    counts = torch.histc(torch.exp(-times.double()), bins=100, min=0, max=1)
    assert ((counts - 4000) ** 2 / 4000).sum() < 149.4, "99 degrees of freedom, p = 0.001"


def test_what_does_not_fit_is_refused():
    logits = random(2, 30, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"temperature has shape \[3\]"):
        sample(logits, *settings(3))
    with pytest.raises(ValueError, match=r"forbidden is torch\.int64"):
        sample(logits, *settings(2), torch.zeros(2, 1, dtype=torch.int64, device=DEVICE))
