"""Norms, the gate, and rotation with the write into pages."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, close, random, strided

from baton.kernels import (
    add_rms_norm,
    naive_add_rms_norm,
    naive_rms_norm,
    naive_rope_and_write,
    naive_silu_mul,
    rms_norm,
    rope_and_write,
    silu_mul,
)

ROWS = [(1, 64), (3, 100), (17, 1000)]
# (rows, heads, kv heads, head dim, page size, with norms)
ROPE = [(1, 3, 1, 64, 16, False), (5, 8, 8, 80, 16, False), (6, 14, 2, 128, 32, True), (3, 4, 4, 96, 16, True)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_norms_are_their_naive_twins(shape, dtype):
    x, weight, residual = strided(random(*shape, dtype=dtype)), random(shape[1], dtype=dtype, seed=8), random(*shape, dtype=dtype, seed=9)
    close(rms_norm(x, weight, 1e-5), naive_rms_norm(x, weight, 1e-5), dtype, times=2)
    ours, theirs = strided(residual), residual.clone()
    close(add_rms_norm(x, ours, weight, 1e-5), naive_add_rms_norm(x, theirs, weight, 1e-5), dtype, times=2)
    assert torch.equal(ours, theirs)


def test_the_naive_norm_is_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    for dtype in (torch.float32, torch.bfloat16):
        theirs = modeling.Qwen3RMSNorm(100, eps=1e-6).to(dtype)
        theirs.weight.data = torch.randn(100, generator=torch.Generator().manual_seed(3)).to(dtype)
        x = torch.randn(3, 100, generator=torch.Generator().manual_seed(4)).to(dtype)
        assert torch.equal(naive_rms_norm(x, theirs.weight, 1e-6), theirs(x))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 200), (17, 2600)], ids=str)
def test_the_gate_is_its_naive_twin(shape, dtype):
    gate_up = strided(random(*shape, dtype=dtype))
    close(silu_mul(gate_up), naive_silu_mul(gate_up), dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    close(naive_silu_mul(gate_up), gate * torch.sigmoid(gate) * up, dtype)


def rope_case(case, dtype):
    rows, num_heads, num_kv_heads, head_dim, page_size, normed = case
    angles = torch.outer(torch.arange(50.0), 1.0 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim))
    turns = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1).to(DEVICE)
    positions = torch.arange(rows, device=DEVICE) * 7
    slots = torch.randperm(4 * page_size, generator=torch.Generator().manual_seed(1))[:rows].to(DEVICE)
    slots[rows // 2 :: 3] = -1
    norms = [random(head_dim, dtype=dtype, seed=seed) for seed in (2, 3)] if normed else [None, None]
    qkv = random(rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    # One layer of a pool: keys and values side by side, so that neither is contiguous.
    pool = torch.full((4, page_size, 2, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    return qkv, positions, slots, turns, pool, num_heads, num_kv_heads, norms


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", ROPE, ids=str)
def test_rope_is_its_naive_twin(case, dtype):
    qkv, positions, slots, turns, pool, num_heads, num_kv_heads, norms = rope_case(case, dtype)
    ours, our_pool = strided(qkv), pool.clone()
    rope_and_write(ours, positions, slots, turns, our_pool[:, :, 0], our_pool[:, :, 1], num_heads, num_kv_heads, *norms, 1e-6)
    naive_rope_and_write(qkv, positions, slots, turns, pool[:, :, 0], pool[:, :, 1], num_heads, num_kv_heads, *norms, 1e-6)
    close(ours, qkv, dtype, times=2)
    assert torch.equal(our_pool.isnan(), pool.isnan()), "a slot that no row owns was written, or one was left out"
    close(our_pool.nan_to_num(), pool.nan_to_num(), dtype, times=2)


def test_the_naive_rope_is_a_complex_product():
    qkv, positions, slots, turns, pool, num_heads, num_kv_heads, norms = rope_case(ROPE[1], torch.float32)
    before = qkv.clone().view(5, -1, 80)
    naive_rope_and_write(qkv, positions, slots, turns, pool[:, :, 0], pool[:, :, 1], num_heads, num_kv_heads, *norms)
    turn = torch.view_as_complex(turns.view(-1, 40, 2))[positions].unsqueeze(1)
    rotated = torch.view_as_real(torch.view_as_complex(before[:, :16].reshape(5, 16, 40, 2)) * turn).flatten(-2)
    close(qkv.view(5, -1, 80)[:, :16], rotated, torch.float32)
    assert torch.equal(qkv.view(5, -1, 80)[:, 16:], before[:, 16:])
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(pool[slot // 16, slot % 16, 0], qkv.view(5, -1, 80)[row, 8:16])
            assert torch.equal(pool[slot // 16, slot % 16, 1], before[row, 16:])


def test_what_does_not_fit_is_refused():
    x = random(2, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"weight has shape \[63\]; it must be \[64\]"):
        rms_norm(x, x[0, :63], 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(random(64, 2, dtype=torch.float32).T, x[0], 1e-5)
    with pytest.raises(ValueError, match="float64"):
        silu_mul(x.double())
    with pytest.raises(ValueError, match="63 columns"):
        silu_mul(x[:, :63])
