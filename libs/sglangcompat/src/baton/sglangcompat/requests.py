"""A GenerateRequest as a Start for this worker. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.sglangcompat.rooms import room_number
from baton.sglangcompat.sampling import refused, to_sampling
from baton.wire.v1 import worker_pb2

#: Of request ids, which gateways make: "chatcmpl-", random letters, a UUID.
MAX_REQUEST_ID_CHARS = 512

#: Fields of a request that ask for what no answer of ours has.
_NOT_MADE = (
    ("return_logprob", "log probabilities (decode does not know that of the first token, which prefill drew) are"),
    ("return_hidden_states", "hidden states are"),
    ("custom_logit_processor", "logit processors are"),
    ("input_embeds", "embeddings as a prompt are"),
    ("lora_id", "adapters are"),
    ("token_ids_logprob", "log probabilities are"),
)


def to_start(request: Any, info: worker_pb2.WorkerInfo, eos_token_ids: Iterable[int]) -> worker_pb2.Start:
    """Without its leg, its limits and its trace. request: sglang.grpc.scheduler.GenerateRequest. Raises RefusedError."""
    _check(request)
    room = room_number(request.request_id, request.disaggregated_params.bootstrap_room)
    prompt = request.tokenized.input_ids
    page_size = info.fingerprint.page_size
    most = min(info.max_model_len, info.load.total_pages * page_size) - len(prompt)
    sampling = to_sampling(
        request.sampling_params,
        seed=room,
        most_tokens=max(1, most),
        eos_token_ids=eos_token_ids,
        vocab_size=info.vocab_size,
        level=info.sampling_level,
    )
    return worker_pb2.Start(room=room, prompt_token_ids=prompt, sampling=sampling)


def _check(request: Any) -> None:
    if not 0 < len(request.request_id) <= MAX_REQUEST_ID_CHARS:
        shown = f"{request.request_id[:32]!r} ({len(request.request_id)} characters)"
        raise refused("request_id", shown, f"outside of 1 to {MAX_REQUEST_ID_CHARS} characters: both servers find their room by it")
    for field, what in _NOT_MADE:
        if getattr(request, field):
            raise refused(field, "given", f"refused: {what} not made by this server: leave it out")
    if request.HasField("mm_inputs") and request.mm_inputs.ByteSize():
        raise refused("mm_inputs", "given", "refused: this server takes tokens only: leave it out")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank:
        raise refused("data_parallel_rank", request.data_parallel_rank, "no rank of this server, which has rank 0 only")
