"""Chained launches: the same results, eagerly and captured, or a refusal."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, random, scattered

from baton.kernels import add_rms_norm, can_chain, chain_launches, decode_attention, is_chained, linear_few, linear_few_norm, rope_and_write


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU may be able to chain launches")
def test_without_a_gpu_launches_cannot_be_chained():
    assert not can_chain(torch.device("cpu"))
    with pytest.raises(ValueError, match="no GPU"), chain_launches():
        pass
    assert not is_chained()


def layers(x, weights, paged, turns, numbers):
    """A few layers as a decode step has them, each launch in need of the one before."""
    stream = x.clone()
    for qkv_weight, out_weight, norm in weights:
        qkv = linear_few(add_rms_norm(torch.zeros_like(stream), stream, norm, 1e-5), qkv_weight)
        rope_and_write(qkv, *numbers, turns, *paged[:2], 8, 2)
        attended = decode_attention(qkv[:, :512].view(len(x), 8, 64), *paged)
        stream, normed = linear_few_norm(attended.flatten(1), out_weight, None, stream, norm, 1e-5)
        stream = stream + normed
    return stream


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter launches nothing")
def test_chained_launches_see_what_was_written_before_them():
    if not can_chain(torch.device("cuda")):
        pytest.skip("this GPU cannot chain launches")
    x = random(4, 512, dtype=torch.bfloat16)
    weights = [
        (
            random(768, 512, dtype=torch.bfloat16, seed=n) / 23,
            random(512, 512, dtype=torch.bfloat16, seed=n + 50) / 23,
            random(512, dtype=torch.bfloat16),
        )
        for n in range(12)
    ]
    paged = scattered([400, 33, 700, 1], 16, 2, 64, torch.bfloat16)
    turns = random(1000, 64, dtype=torch.float32)
    slots = torch.stack([paged[2][row, (length - 1) // 16] * 16 + (length - 1) % 16 for row, length in enumerate(paged[3].tolist())]).long()
    numbers = (paged[3].long() - 1, slots)
    expected = layers(x, weights, paged, turns, numbers)
    with chain_launches():
        assert is_chained()
        assert torch.equal(layers(x, weights, paged, turns, numbers), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layers(x, weights, paged, turns, numbers)
        for _ in range(20):
            graph.replay()
            assert torch.equal(captured, expected)
    assert not is_chained()
