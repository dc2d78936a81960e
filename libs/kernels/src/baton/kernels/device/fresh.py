"""Attention of whole prompts through torch: which of its backends takes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence as List
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_log = logging.getLogger(__name__)

#: cuDNN plans anew for every length it has not seen, which takes longer than it saves: it gets long prompts (and chunks) of round lengths.
CUDNN_STEP = 256
CUDNN_LEAST = 1024

#: What took a kind of prompt (dtype, head dim, heads a group, round length): the backend, and whether it takes grouped heads as they are.
_taken: dict[tuple[torch.dtype, int, int, bool], tuple[SDPBackend, bool]] = {}


def fresh_backends() -> dict[str, str]:
    """What each kind of prompt seen so far runs on. For benchmarks and logs."""
    return {
        f"{kind[0]}, head dim {kind[1]}, group {kind[2]}, {'round' if kind[3] else 'any'} length": f"{backend.name}{'' if grouped else ', expanded'}"
        for kind, (backend, grouped) in _taken.items()
    }


def torch_fresh_attention(query: Tensor, keys: Tensor, values: Tensor, query_starts: List[int], scale: float | None) -> Tensor:
    runs = [(first, last) for first, last in pairwise(query_starts) if last > first]
    if len(runs) == 1:
        return _prompt(query, keys, values, scale)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for first, last in runs:
        output[first:last] = _prompt(query[first:last], keys[first:last], values[first:last], scale)
    return output


def _prompt(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // keys.shape[1]
    kind = (query.dtype, head_dim, group, num_tokens % CUDNN_STEP == 0 and num_tokens >= CUDNN_LEAST)
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, keys, values))
    if kind not in _taken:
        _taken[kind] = _first_that_takes(q, k, v, scale, kind[3])
        _log.info("attention of fresh prompts (%s, head dim %d, group %d) runs on %s", query.dtype, head_dim, group, _taken[kind][0].name)
    return _run(q, k, v, scale, *_taken[kind]).squeeze(0).transpose(0, 1).contiguous()


def _first_that_takes(q: Tensor, k: Tensor, v: Tensor, scale: float | None, round_length: bool) -> tuple[SDPBackend, bool]:
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if round_length:
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)
    refusals = []
    for backend in backends:
        for grouped in (True, False):
            try:
                _run(q, k, v, scale, backend, grouped)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as refusal:
                refusals.append(f"{backend.name}: {refusal}")
            else:
                return backend, grouped
    raise ValueError(f"no attention of torch takes query {list(q.shape)} and keys {list(k.shape)} of {q.dtype}: {'; '.join(refusals)}")


def _run(q: Tensor, k: Tensor, v: Tensor, scale: float | None, backend: SDPBackend, grouped: bool) -> Tensor:
    group = q.shape[1] // k.shape[1]
    if group > 1 and not grouped:
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    with sdpa_kernel([backend]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1 and grouped)
