"""An answer that goes on behind tokens that are there already: on another server, as if nothing had happened. Pure.

Sampling is keyed by (seed, position in prompt and answer), so the same seed behind the same tokens draws the same next one. What counts tokens of
the answer (max_tokens, min_tokens, penalties) counts on from those that are there. Stop strings are the gateway's own business and know nothing of
rooms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.gateway.admission import Admitted
from baton.gateway.worker import Worker
from baton.wire.v1 import common_pb2, worker_pb2


def continued(admitted: Admitted, given: Sequence[int]) -> Admitted:
    """The request whose answer is what is left of `admitted`'s behind `given`, which must not be the whole of it. It goes on by itself: other answers
    to the prompt have rooms of their own by then."""
    if not given:
        return admitted if admitted.num_choices == 1 else replace(admitted, num_choices=1)
    sampling = worker_pb2.Sampling()
    sampling.CopyFrom(admitted.sampling)
    assert len(given) < sampling.max_tokens, "nothing is left to be computed"
    sampling.max_tokens -= len(given)
    sampling.min_tokens = max(0, sampling.min_tokens - len(given))
    sampling.answered_tokens += len(given)
    sampling.ClearField("prompt_logprobs")  # the client has them
    return Admitted([*admitted.prompt, *given], sampling, admitted.stop, admitted.sampling_level)


def ended_by(sampling: worker_pb2.Sampling, tokens: Sequence[int]) -> common_pb2.FinishReason.ValueType | None:
    """Why an answer of `tokens` is complete; None: it is not."""
    if tokens and len(tokens) >= sampling.min_tokens and tokens[-1] in sampling.stop_token_ids:
        return common_pb2.FINISH_REASON_STOP
    return common_pb2.FINISH_REASON_LENGTH if len(tokens) >= sampling.max_tokens else None


def weights_of(server: Worker) -> tuple[str, str, str]:
    """What must be the same where an answer goes on: another model's tokens would not fit behind it."""
    assert server.info is not None
    fingerprint = server.info.fingerprint
    return fingerprint.model, fingerprint.weights, fingerprint.dtype
