"""Draws the next token. The same (seed, position, logits) give the same token on any server and in any batch."""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.adjust import adjust
from baton.engine.philox import draw_key
from baton.engine.race import arrivals
from baton.engine.types import SamplingParams

#: Filters find their last token through a histogram of the logits: this many bins, each this part of a factor e in probability wide.
_NUM_BINS = 2048
_BINS_PER_E = 64


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's token: `position` in the sequence (the prompt's first token is 0), number `index` of the answer. history: the `position` tokens
    before it; needed where `params` penalise."""

    params: SamplingParams
    position: int
    index: int
    history: List[int] = ()

    @property
    def num_answered(self) -> int:
        """How many of the last tokens of `history` are answer."""
        return self.index + self.params.answered_tokens


@torch.inference_mode()
def sample(logits: Tensor, draws: List[Draw]) -> list[int | None]:
    """logits [rows, vocabulary] float32, may be overwritten -> a token a row; None where a row's logits are not finite.

    First the request's penalties and bias (`adjust`), then the stop tokens that may not come yet are ruled out.
    Temperature 0 takes the largest logit (the lowest id among equals). Otherwise: temperature, top_k, top_p, min_p in that order,
    then a race of the tokens that are left, with times that `draw_key(seed, position)` decides. A filter keeps every token that is as
    probable as the last one it keeps, so that the order of equals does not matter.
    """
    for row, draw in enumerate(draws):
        if draw.params.adjusts:
            adjust(logits[row], draw.params, torch.tensor(draw.history, dtype=torch.int64), draw.num_answered)
    _forbid_early_stop(logits, draws)
    best, tokens = logits.max(dim=-1)
    drawn: list[int | None] = list(tokens.tolist())
    for row, value in enumerate(best.tolist()):
        if not math.isfinite(value):
            drawn[row] = None
    random = [row for row, draw in enumerate(draws) if draw.params.temperature > 0 and drawn[row] is not None]
    if random:
        params = [draws[row].params for row in random]
        weights = _weights(logits[random] if len(random) < len(draws) else logits, best[random], params)
        for row, weight in zip(random, weights, strict=True):
            weight.div_(arrivals(draw_key(draws[row].params.seed, draws[row].position), len(weight)))
        for row, token in zip(random, weights.argmax(dim=-1).tolist(), strict=True):
            drawn[row] = token
    return drawn


def filtered_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """[vocabulary] float32: the distribution that `sample` draws from at a temperature above 0. For tests and logprobs."""
    weights = _weights(logits.unsqueeze(0), logits.max().unsqueeze(0), [params])[0]
    return weights / weights.sum()


def _forbid_early_stop(logits: Tensor, draws: List[Draw]) -> None:
    for row, draw in enumerate(draws):
        if draw.index < draw.params.min_tokens and draw.params.stop_token_ids:
            logits[row, [token for token in draw.params.stop_token_ids if token < logits.shape[-1]]] = -math.inf


def _weights(logits: Tensor, best: Tensor, params: List[SamplingParams]) -> Tensor:
    """[rows, vocabulary] float32: unnormalised probabilities, 0 where a filter says no."""
    # The largest scaled logit is 0: nothing overflows at any temperature.
    scaled = (logits - best.unsqueeze(-1)).div_(torch.tensor([[each.temperature] for each in params]))
    for row, each in zip(scaled, params, strict=True):
        edge = _edge(row, each, logits.shape[-1])
        if edge is not None:
            row.masked_fill_(row < edge, -math.inf)
    return scaled.exp_()


def _edge(row: Tensor, params: SamplingParams, vocab_size: int) -> Tensor | None:
    """The least scaled logit that all filters keep; None when there is no filter."""
    edges: list[Tensor] = []
    if 0 < params.top_k < vocab_size:
        edges.append(_kth_largest(row, params.top_k))
    if params.top_p < 1:
        edges.append(_nucleus_edge(row[row >= edges[0]] if edges else row, params.top_p))
    if params.min_p > 0:
        edges.append(torch.tensor(math.log(params.min_p)))
    return torch.stack(edges).max() if edges else None


def _bins(row: Tensor) -> Tensor:
    """Which bin of the histogram each value (at most 0) falls into; the last one takes all that is left."""
    return (row * -_BINS_PER_E).clamp_(max=_NUM_BINS - 1).long()


def _kth_largest(row: Tensor, k: int) -> Tensor:
    bins = _bins(row)
    upto = torch.bincount(bins, minlength=_NUM_BINS).cumsum(dim=0)
    last = int(torch.searchsorted(upto, k))
    before = int(upto[last - 1]) if last else 0
    return row[bins == last].topk(k - before).values[-1]


def _nucleus_edge(row: Tensor, top_p: float) -> Tensor:
    """The last value of the smallest set of most probable tokens whose probabilities reach top_p. Only one bin is sorted."""
    bins = _bins(row)
    upto = torch.bincount(bins, weights=row.exp().double(), minlength=_NUM_BINS).cumsum(dim=0)
    wanted = upto[-1] * top_p
    last = int(torch.searchsorted(upto, wanted))
    inside = row[bins == last].sort(descending=True).values
    mass = inside.exp().double().cumsum(dim=0)
    if last:
        mass += upto[last - 1]
    return inside[min(int(torch.searchsorted(mass, wanted)), len(inside) - 1)]
