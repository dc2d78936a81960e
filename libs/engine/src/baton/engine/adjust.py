"""What a request changes in its logits before a token is drawn: penalties, bias, what its grammar rules out. The same on every device.

Nothing is kept from token to token: what a penalty needs is read off the tokens themselves. So a prompt that is computed again, after a retraction
or on another server, gives what the first one gave.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.device.upload import upload, upload_array
from baton.engine.types import SamplingParams

#: Token ids [n] int64 and what is added to the logit of each [n] float32.
Bias = tuple[Tensor, Tensor]


def adjust(row: Tensor, params: SamplingParams, history: Tensor, num_answered: int, bias: Bias | None = None) -> None:
    """row [vocabulary] float32, changed in place. history [n] int64, on its device: prompt and answer so far, whose last `num_answered` are
    answer; may be empty where nothing penalises. bias: `bias_of(params)`, where it is kept. Never waits for the device.

    In this order: logits of tokens in prompt or answer are divided by repetition_penalty where they are positive and multiplied where they are
    negative; frequency_penalty is taken off as many times as the answer has the token, presence_penalty once where it has it; bias is added; what the
    grammar does not allow is ruled out. Waits for the grammar's mask, if that is not made yet.
    """
    if params.repetition_penalty != 1.0:
        # A token that stands there twice is written twice, with the same value.
        values = row[history]
        row[history] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        answer = history[len(history) - num_answered :]
        counts = torch.zeros_like(row).index_add_(0, answer, torch.ones(len(answer), dtype=row.dtype, device=row.device))
        row[answer] = row[answer] - (counts[answer] * params.frequency_penalty + params.presence_penalty)
    if params.logit_bias:
        tokens, values = bias or bias_of(params, row.device)
        row.index_add_(0, tokens, values)
    if params.grammar is not None:
        row.masked_fill_(upload_array(params.grammar.forbidden(), row.device), -math.inf)


def bias_of(params: SamplingParams, device: torch.device) -> Bias:
    tokens, values = zip(*params.logit_bias, strict=True)
    return upload(tokens, torch.int64, device), upload(values, torch.float32, device)
