"""Products of few rows, products in a fixed order, and a mixture of experts."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, close, random, strided

from baton.kernels import (
    grouped_linear,
    linear_few,
    linear_few_norm,
    linear_invariant,
    moe_combine,
    moe_route,
    naive_grouped_linear,
    naive_linear_few,
    naive_linear_invariant,
    naive_moe_combine,
    naive_moe_route,
    rms_norm,
)

# (rows, result's width, depth)
SHAPES = [(1, 48, 64), (3, 40, 176), (16, 130, 1024), (17, 64, 64), (33, 20, 80)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("fused", ["plain", "bias+residual", "gate", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_rows_are_their_naive_twin(shape, fused, dtype):
    num_rows, width, depth = shape
    options = {}
    if fused in ("gate", "all"):
        options |= {"silu_mul": True}
    if fused in ("bias+residual", "all"):
        options["bias"] = random(width * 2 if fused == "all" else width, dtype=dtype, seed=5)
        options["residual"] = random(num_rows, width, dtype=dtype, seed=6)
    x = strided(random(num_rows, depth, dtype=dtype))
    weight = random(width * 2 if "silu_mul" in options else width, depth, dtype=dtype, seed=3) / depth**0.5
    close(linear_few(x, weight, **options), naive_linear_few(x, weight, **options), dtype, times=3)


@pytest.mark.parametrize("options", [{}, {"silu_mul": True}], ids=str)
@pytest.mark.parametrize("depth", [256, 512, 400])
def test_a_sum_in_shares(depth, options):
    from baton.kernels.device.linear import LinearTiling, launch_linear_few

    x, weight = random(3, depth, dtype=torch.float32), random(80, depth, dtype=torch.float32, seed=3) / depth**0.5
    width = 40 if "silu_mul" in options else 80
    residual = random(3, width, dtype=torch.float32, seed=5)
    tiling = LinearTiling(columns=32, depth=128, splits=4, num_warps=4, num_stages=2)
    result = launch_linear_few(x, weight, None, residual, options.get("silu_mul", False), None, tiling)
    close(result, naive_linear_few(x, weight, None, residual, **options), torch.float32, times=3)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_and_the_norm_of_its_sum(splits, with_bias, dtype):
    """Bit for bit what the two calls give: the norm reads what was rounded."""
    from baton.kernels.device.linear import LinearTiling, launch_linear_few, launch_linear_few_norm

    x, weight = random(3, 512, dtype=dtype), random(80, 512, dtype=dtype, seed=3) / 512**0.5
    bias = random(80, dtype=dtype, seed=4) if with_bias else None
    residual, norm = strided(random(3, 80, dtype=dtype, seed=5)), random(80, dtype=dtype, seed=6)
    tiling = LinearTiling(columns=32, depth=128, splits=splits, num_warps=4, num_stages=2)
    rows, normed = launch_linear_few_norm(x, weight, bias, residual, norm, 1e-6, tiling)
    assert torch.equal(rows, launch_linear_few(x, weight, bias, residual, False, None, tiling))
    assert torch.equal(normed, rms_norm(rows, norm, 1e-6))
    close(rows, naive_linear_few(x, weight, bias, residual), dtype, times=3)
    both = linear_few_norm(x, weight, bias, residual, norm, 1e-6)
    close(both[1], normed, dtype, times=10)


def test_a_result_may_replace_the_residual():
    x, weight = random(3, 64, dtype=torch.float32), random(48, 64, dtype=torch.float32, seed=3)
    residual = strided(random(3, 48, dtype=torch.float32, seed=4))
    expected = naive_linear_few(x, weight, None, residual)
    result = linear_few(x, weight, None, residual, out=residual)
    assert result is residual
    close(result, expected, torch.float32, times=10)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_rows_product_does_not_know_the_other_rows(dtype):
    few, many = 16, 70 if DEVICE == "cpu" else 200
    x, weight, bias = (random(*shape, dtype=dtype, seed=len(shape)) for shape in ((many, 144), (40, 144), (40,)))
    together, some = linear_invariant(x, weight, bias), linear_few(x[:few], weight)
    close(together, naive_linear_invariant(x, weight, bias), dtype, times=20)
    # The interpreter multiplies in numpy, whose sums depend on the shape of a tile; a tensor core's must not.
    same = torch.equal if DEVICE == "cuda" else lambda left, right: torch.allclose(left, right, rtol=1e-3, atol=1e-3)
    for rows in (1, 3, 64):
        assert same(linear_invariant(x[5 : 5 + rows], weight, bias), together[5 : 5 + rows])
    for rows in (1, 7):
        assert same(linear_few(x[5 : 5 + rows], weight), some[5 : 5 + rows])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_an_experts_product_does_not_know_the_other_rows(dtype):
    tokens = 20 if DEVICE == "cpu" else 600
    x, weight, logits = (random(*shape, dtype=dtype, seed=len(shape)) for shape in ((tokens, 144), (4, 40, 144), (tokens, 4)))
    together = grouped_linear(x, weight, *moe_route(logits, 2, True)[2:], invariant=True)
    same = torch.equal if DEVICE == "cuda" else lambda left, right: torch.allclose(left, right, rtol=1e-3, atol=1e-3)
    for rows in (1, 9):
        alone = grouped_linear(x[:rows], weight, *moe_route(logits[:rows], 2, True)[2:], invariant=True)
        assert same(alone, together[: 2 * rows])


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (17, 6, 3), (40, 5, 5), (3, 130, 8)])
def test_routing_is_its_naive_twin(num_tokens, num_experts, top_k, renormalize, monkeypatch):
    from baton.kernels.device import experts as launches

    monkeypatch.setattr(launches, "SORT_BLOCK", 64)  # several rounds of the sort
    logits = random(num_tokens, num_experts, dtype=torch.float32)
    logits[0] = 1.0  # equals: the lower ids win
    weights, experts, sorted_index, offsets = moe_route(logits, top_k, renormalize)
    expected = naive_moe_route(logits, top_k, renormalize)
    close(weights, expected[0], torch.float32)
    assert experts[0].tolist() == list(range(top_k))
    for ours, theirs in zip((experts, sorted_index, offsets), expected[1:], strict=True):
        assert torch.equal(ours, theirs)
    assert sorted(sorted_index.tolist()) == list(range(num_tokens * top_k))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (17, 6, 3), (40, 3, 1)])
def test_a_mixture_is_its_naive_twin(num_tokens, num_experts, top_k, dtype):
    x = random(num_tokens, 80, dtype=dtype)
    up, down = random(num_experts, 40, 80, dtype=dtype, seed=2) / 9, random(num_experts, 72, 48, dtype=dtype, seed=3) / 7
    weights, _, sorted_index, offsets = moe_route(random(num_tokens, num_experts, dtype=torch.float32), top_k, True)
    hidden = grouped_linear(x, up, sorted_index, offsets)
    close(hidden, naive_grouped_linear(x, up, sorted_index, offsets), dtype, times=3)
    hidden = torch.nn.functional.pad(hidden, (0, 8))
    outputs = grouped_linear(hidden, down, sorted_index, offsets)
    close(outputs, naive_grouped_linear(hidden, down, sorted_index, offsets), dtype, times=3)
    residual = random(num_tokens, 72, dtype=dtype, seed=4)
    close(moe_combine(outputs, weights, residual), naive_moe_combine(outputs, weights, residual), dtype, times=3)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_that_is_not_a_number_gets_experts_that_exist():
    logits = random(3, 6, dtype=torch.float32)
    logits[1] = float("nan")
    _, experts, sorted_index, offsets = moe_route(logits, 2, True)
    assert experts.min() >= 0
    assert experts.max() < 6
    assert sorted(sorted_index.tolist()) == list(range(6))
    assert offsets[-1] == 6


def test_the_naive_mixture_is_a_loop_over_tokens():
    x, weight = random(5, 32, dtype=torch.float32), random(4, 16, 32, dtype=torch.float32, seed=2)
    logits = random(5, 4, dtype=torch.float32, seed=3)
    weights, experts, sorted_index, offsets = naive_moe_route(logits, 2, True)
    result = naive_moe_combine(naive_grouped_linear(x, weight, sorted_index, offsets), weights)
    for token in range(5):
        chances = logits[token].softmax(-1).topk(2)
        assert experts[token].tolist() == chances.indices.tolist()
        parts = [share * (weight[expert] @ x[token]) for share, expert in zip(chances.values / chances.values.sum(), chances.indices, strict=True)]
        close(result[token], sum(parts), torch.float32, times=5)


def test_what_does_not_fit_is_refused():
    x = random(65, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match="x has 65 rows"):
        linear_few(x, x)
    with pytest.raises(ValueError, match="multiple of 16"):
        linear_invariant(x[:, :60], x[:, :60])
    with pytest.raises(ValueError, match="gate and up"):
        linear_few(x[:4], x, silu_mul=True)
    with pytest.raises(ValueError, match="top_k = 9"):
        moe_route(x[:, :8], 9, True)
    with pytest.raises(ValueError, match="65 assignments"):
        grouped_linear(x[:2], x.view(5, 13, 64), torch.zeros(65, dtype=torch.int32, device=DEVICE), torch.zeros(6, dtype=torch.int32, device=DEVICE))
