"""SGLang's sampling parameters as ours, or refused with the field's name: nothing that was asked for is left out in silence. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.wire.v1 import worker_pb2
from baton.workerkit import RefusedError

#: The `sampling_level` of workers that heed penalties and biases.
LEVEL_OF_PENALTIES = 1

_CONSTRAINTS = "refused: structured output is taken over Baton's own contract only: leave it out, or ask Baton's gateway for it"


def to_sampling(given: Any, *, seed: int, most_tokens: int, eos_token_ids: Iterable[int], vocab_size: int, level: int) -> worker_pb2.Sampling:
    """given: sglang.grpc.scheduler.SamplingParams. most_tokens: length of an answer that names none. level: the worker's `sampling_level`.

    The contract has no seed: `seed` must be what the other server draws by as well. Ranges are checked where every gateway's are, at the worker's
    intake. Raises RefusedError.
    """
    _refuse_what_is_not_made(given)
    sampling = worker_pb2.Sampling(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=_top_k(given.top_k, vocab_size),
        min_p=given.min_p,
        seed=seed,
        max_tokens=given.max_new_tokens if given.HasField("max_new_tokens") else most_tokens,
        min_tokens=given.min_new_tokens,
        stop_token_ids=sorted({*given.stop_token_ids, *(() if given.ignore_eos else eos_token_ids)}),
    )
    _add_penalties(sampling, given, vocab_size, level)
    return sampling


def _top_k(top_k: int, vocab_size: int) -> int:
    """-1 is off there, 0 here."""
    if top_k == -1:
        return 0
    if not 0 <= top_k <= vocab_size:
        raise refused("sampling_params.top_k", top_k, f"outside [0, {vocab_size}], and not -1 (off)")
    return top_k


def _refuse_what_is_not_made(given: Any) -> None:
    constraint = given.WhichOneof("constraint")
    if constraint is not None:
        raise refused(f"sampling_params.{constraint}", "given", _CONSTRAINTS)
    if given.n > 1:
        raise refused("sampling_params.n", given.n, "more than 1: send a request for each answer")
    if given.stop:
        remedy = "text, and this server has no tokenizer: the gateway cuts answers at stop strings; send stop_token_ids"
        raise refused("sampling_params.stop", list(given.stop), remedy)
    if given.custom_params.fields:
        raise refused("sampling_params.custom_params", sorted(given.custom_params.fields), "of no meaning to this server: leave them out")


def _add_penalties(sampling: worker_pb2.Sampling, given: Any, vocab_size: int, level: int) -> None:
    wanted = {
        "frequency_penalty": given.frequency_penalty,
        "presence_penalty": given.presence_penalty,
        "repetition_penalty": 0.0 if given.repetition_penalty == 1.0 else given.repetition_penalty,
    }
    for name, value in wanted.items():
        if value:
            _check_level(f"sampling_params.{name}", value, level)
            setattr(sampling, name, value)
    for text, value in sorted(given.logit_bias.items()):
        _check_level("sampling_params.logit_bias", f"{text}: {value:g}", level)
        if not (text.isascii() and text.isdecimal() and int(text) < vocab_size):
            raise refused("sampling_params.logit_bias", text, f"no token of the vocabulary [0, {vocab_size})")
        sampling.bias_token_ids.append(int(text))
        sampling.bias_values.append(value)


def _check_level(field: str, value: object, level: int) -> None:
    if level < LEVEL_OF_PENALTIES:
        raise refused(field, value, "not heeded by this server: leave it out")


def refused(field: str, value: object, what: str) -> RefusedError:
    """INVALID_ARGUMENT, which a gateway does not try again."""
    return RefusedError("INVALID_ARGUMENT", "sglang_unsupported", f"{field}={value} is {what}")
