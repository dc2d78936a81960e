"""What some sequences need beyond their seat: the tokens that penalties look at, the tokens that have a bias. And what a launch has drawn."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.adjust import Bias, adjust, bias_of
from baton.engine.device.upload import upload
from baton.engine.logprobs import scores
from baton.engine.scheduling.sequence import Sequence, Slice
from baton.engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Part:
    """tokens [n] int64 on the device, -1 where logits were not finite. asked: (row, how many of the most probable) of those whose log probabilities
    are to be told, and `scores` of these rows; None where nobody asked."""

    tokens: Tensor
    asked: List[tuple[int, int]] = ()
    scores: Tensor | None = None


def asked_of(sampling: List[SamplingParams]) -> list[tuple[int, int]]:
    return [(row, each.top_logprobs) for row, each in enumerate(sampling) if each.top_logprobs is not None]


def part(tokens: Tensor, asked: List[tuple[int, int]], as_given: Tensor | None) -> Part:
    """as_given [asked, vocabulary]: the logits of those rows, as the model gave them."""
    if as_given is None:
        return Part(tokens)
    rows = upload([row for row, _ in asked], torch.int64, tokens.device)
    return Part(tokens, asked, scores(as_given, tokens[rows]))


class Extra:
    """Of one seated sequence whose logits are adjusted. The host is a step behind: tokens that it does not know yet come from the seat."""

    def __init__(self, sequence: Sequence, device: torch.device) -> None:
        sampling = sequence.request.sampling
        self._params = sampling
        self._num_prompt = sequence.num_prompt
        self._history = torch.zeros(0, dtype=torch.int64, device=device)
        if sampling.penalises:
            self._history = torch.zeros(sequence.num_prompt + sampling.max_tokens, dtype=torch.int64, device=device)
            self._history[: len(sequence.tokens)].copy_(upload(sequence.tokens, torch.int64, device))
        self._bias: Bias | None = bias_of(sampling, device) if sampling.logit_bias else None

    def follow(self, piece: Slice, token: Tensor) -> None:
        """token, one number on the device: the one that this step computes."""
        if len(self._history):
            self._history[piece.start].copy_(token)

    def adjust(self, row: Tensor, piece: Slice) -> None:
        """row [vocabulary] float32: what the step of `piece` gave, changed in place."""
        end = piece.start + piece.count
        adjust(row, self._params, self._history[:end], end - self._num_prompt + self._params.answered_tokens, self._bias)
