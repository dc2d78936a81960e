"""Log probabilities of a prompt's own tokens: rows of a pass meet the output head a few at a time, so that not all their logits are there at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.device.upload import upload
from baton.engine.logprobs import told
from baton.engine.scheduling.sequence import Slice
from baton.engine.types import MAX_TOP_LOGPROBS, Logprobs

#: Of a vocabulary of 150,000 that is 39 MB of float32.
ROWS_AT_ONCE = 64

#: [rows, hidden size] as the last layer leaves them -> [rows, vocabulary].
Head = Callable[[Tensor], Tensor]
#: Gets all rows of a pass, and the head.
Also = Callable[[Tensor, Head], None]


@dataclass(frozen=True, slots=True)
class Scored:
    """What of a pass is scored: rows, and the token that follows each in its prompt. pieces: whose they are, in order."""

    rows: list[int]
    targets: list[int]
    pieces: list[Slice]

    @torch.inference_mode()
    def scores(self, hidden: Tensor, head: Head) -> Tensor:
        """[rows, 2 + 2 * n] float64 for `told_prompts`: rank, log probability, those of the n most probable tokens, their ids. Never waits for the
        device."""
        parts = []
        for first in range(0, len(self.rows), ROWS_AT_ONCE):
            rows = upload(self.rows[first : first + ROWS_AT_ONCE], torch.int64, hidden.device)
            targets = upload(self.targets[first : first + ROWS_AT_ONCE], torch.int64, hidden.device)
            parts.append(_scores(head(hidden[rows]).float(), targets))
        return torch.cat(parts)

    def told(self, scores: Tensor) -> list[tuple[Slice, list[Logprobs]]]:
        """By slice. scores: on the host."""
        rows = iter(scores.tolist())
        found = []
        for piece in self.pieces:
            num_top = piece.sequence.request.sampling.prompt_logprobs or 0
            entries = []
            for _ in piece.scored:
                rank, *row = next(rows)
                said = told(row, num_top)
                entries.append(Logprobs(said.logprob, said.top, int(rank)))
            found.append((piece, entries))
        return found


def scored_of(slices: Sequence[Slice]) -> Scored | None:
    """Of a pass whose rows are these slices' tokens, one after the other; None where nothing is scored."""
    rows: list[int] = []
    targets: list[int] = []
    pieces = []
    first = 0
    for piece in slices:
        if piece.scored:
            rows += [first + place - piece.start for place in piece.scored]
            targets += [piece.sequence.tokens[place + 1] for place in piece.scored]
            pieces.append(piece)
        first += piece.count
    return Scored(rows, targets, pieces) if pieces else None


def _scores(logits: Tensor, targets: Tensor) -> Tensor:
    total = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(min(MAX_TOP_LOGPROBS, logits.shape[-1]), dim=-1)
    own = logits.gather(1, targets.unsqueeze(1))
    rank = (logits >= own).sum(dim=-1, keepdim=True)
    return torch.cat([rank.double(), (own - total).double(), (top.values - total).double(), top.indices.double()], dim=1)
