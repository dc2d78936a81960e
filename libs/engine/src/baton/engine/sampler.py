"""Draws the next token. The same (seed, position, logits) give the same token on any server and in any batch."""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.philox import uniform
from baton.engine.types import SamplingParams

#: top_p is usually reached within this many tokens; only then is a full sort avoided.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's token: `position` in the sequence (the prompt's first token is 0), number `index` of the answer."""

    params: SamplingParams
    position: int
    index: int


@torch.inference_mode()
def sample(logits: Tensor, draws: List[Draw]) -> list[int | None]:
    """logits [rows, vocabulary] float32, may be overwritten -> a token a row; None where a row's logits are not finite.

    Temperature 0 takes the largest logit (the lowest id among equals). Otherwise: temperature, top_k, top_p, min_p in that order,
    then the inverse of the cumulative distribution, in the order of token ids, at `uniform(seed, position)`. A filter keeps every token
    that is as probable as the last one it keeps, so that the order of equals does not matter.
    """
    _forbid_early_stop(logits, draws)
    best, tokens = logits.max(dim=-1)
    drawn: list[int | None] = list(tokens.tolist())
    for row, value in enumerate(best.tolist()):
        if not math.isfinite(value):
            drawn[row] = None
    random = [row for row, draw in enumerate(draws) if draw.params.temperature > 0 and drawn[row] is not None]
    if random:
        scaled = _scale(logits[random] if len(random) < len(draws) else logits, [draws[row] for row in random])
        for row, token in zip(random, _draw(scaled, [draws[row] for row in random]), strict=True):
            drawn[row] = token
    return drawn


def filtered_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """[vocabulary] float32: the distribution that `sample` draws from at a temperature above 0. For tests and logprobs."""
    return _scale(logits.clone().unsqueeze(0), [Draw(params, 0, 0)]).softmax(dim=-1)[0]


def _forbid_early_stop(logits: Tensor, draws: List[Draw]) -> None:
    for row, draw in enumerate(draws):
        if draw.index < draw.params.min_tokens and draw.params.stop_token_ids:
            logits[row, [token for token in draw.params.stop_token_ids if token < logits.shape[-1]]] = -math.inf


def _scale(logits: Tensor, draws: List[Draw]) -> Tensor:
    """Divides by the temperatures and sets what the filters leave out to -inf."""
    logits = logits / torch.tensor([[draw.params.temperature] for draw in draws])
    vocab_size = logits.shape[-1]
    for row, draw in enumerate(draws):
        params = draw.params
        if 0 < params.top_k < vocab_size:
            _keep_from(logits[row], logits[row].topk(params.top_k).values[-1])
        if params.top_p < 1:
            _keep_from(logits[row], _nucleus_edge(logits[row], params.top_p))
        if params.min_p > 0:
            _keep_from(logits[row], logits[row].max() + math.log(params.min_p))
    return logits


def _keep_from(row: Tensor, least: Tensor) -> None:
    row.masked_fill_(row < least, -math.inf)


def _nucleus_edge(row: Tensor, top_p: float) -> Tensor:
    """The logit of the last token of the smallest set of most probable tokens whose probabilities reach top_p."""
    total = row.logsumexp(dim=-1)
    for count in (min(_NUCLEUS_GUESS, row.numel()), row.numel()):
        ordered = row.topk(count).values
        mass = (ordered - total).exp().cumsum(dim=-1, dtype=torch.float64)
        if mass[-1] >= top_p or count == row.numel():
            break
    reached = int(torch.searchsorted(mass, torch.tensor(top_p, dtype=torch.float64)))
    return ordered[min(reached, count - 1)]


def _draw(scaled: Tensor, draws: List[Draw]) -> list[int]:
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    chance = torch.tensor([[uniform(draw.params.seed, draw.position)] for draw in draws], dtype=torch.float64)
    # u * total may round up to total, which no cumulative sum exceeds.
    point = torch.minimum(chance * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens: list[int] = torch.searchsorted(cumulative, point, right=True).squeeze(-1).tolist()
    return tokens
