"""Log probabilities of drawn tokens and of the most probable ones, by the logits as the model gives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.types import MAX_TOP_LOGPROBS, Logprobs


def scores(logits: Tensor, tokens: Tensor) -> Tensor:
    """logits [rows, vocabulary], tokens [rows] int64 as drawn -> [rows, 1 + 2 * n] float64: the token's log probability, then those of the n most
    probable tokens, then their ids. n: MAX_TOP_LOGPROBS, or the vocabulary where that is less. Never waits for the device."""
    wide = logits.float()
    total = wide.logsumexp(dim=-1, keepdim=True)
    top = wide.topk(min(MAX_TOP_LOGPROBS, wide.shape[-1]), dim=-1)
    drawn = wide.gather(1, tokens.clamp(min=0).unsqueeze(1))
    return torch.cat([(drawn - total).double(), (top.values - total).double(), top.indices.double()], dim=1)


def told(row: Sequence[float], num_top: int) -> Logprobs:
    """What one row of `scores` says to a request that asked for so many."""
    most = (len(row) - 1) // 2
    pairs = zip(row[1 + most :], row[1 : 1 + most], strict=True)
    return Logprobs(row[0], tuple((int(token), logprob) for token, logprob in list(pairs)[:num_top]))
