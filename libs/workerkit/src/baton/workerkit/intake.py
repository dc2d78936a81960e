"""What may reach the engine: a Start message is turned into a request, or refused with field, value and limit. Pure."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

from baton.engine.grammar import MAX_GRAMMAR_BYTES
from baton.engine.types import MAX_PRIORITY, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, Request, Role, SamplingParams
from baton.wire.v1 import common_pb2, worker_pb2
from baton.workerkit.errors import RefusedError

MAX_ROOM = 2**63 - 1

#: Which fields of the wire's Sampling are heeded here: the proto says what the numbers mean.
SAMPLING_LEVEL = 3

#: Outside of it a 32-bit logit may overflow.
REPETITION_PENALTY = (0.01, 10.0)
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 300

_LEGS = {Role.PREFILL: ("prefill",), Role.DECODE: ("decode", "local", "fork"), Role.PLAIN: ("plain", "fork")}


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    """The half of a room that a prefill server needs: the only decode instance that may publish it."""

    decode_instance_id: str


@dataclass(frozen=True, slots=True)
class DecodePeer:
    """The half of a room that a decode server needs: who computes the prompt, and where it is met."""

    bootstrap_address: str
    prefill_instance_id: str
    #: The gateway's, to be shown when the room is published; None where the gateway signs none.
    ticket: common_pb2.RoomTicket | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """What this worker can hold. num_pages, page_size: of the KV pool (pages, tokens)."""

    role: Role
    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size: int


def take(start: worker_pb2.Start, limits: Limits, now: float) -> Request:
    """The request that `start` asks for, but for its grammar, which is not compiled yet; times are on time.monotonic(). Raises RefusedError."""
    if not 0 < start.room <= MAX_ROOM:
        raise _invalid("room_missing", f"room={start.room} is outside [1, 2**63 - 1]: rooms are drawn by the gateway; send requests there")
    peer = _leg(start, limits.role)
    prompt = list(start.prompt_token_ids)
    _check_prompt(prompt, limits)
    sampling = _sampling(start.sampling, len(prompt), limits)
    if abs(start.priority) > MAX_PRIORITY:
        raise _invalid("priority_out_of_range", f"priority={start.priority} is outside [{-MAX_PRIORITY}, {MAX_PRIORITY}]")
    _check_pool(len(prompt), sampling.max_tokens, limits)
    return Request(
        room=start.room,
        prompt=prompt,
        sampling=sampling,
        deadline=_after(now, start.deadline_ms),
        bootstrap_deadline=_after(now, start.bootstrap_timeout_ms),
        waiting_deadline=None,
        arrived=now,
        peer=peer,
        local=start.WhichOneof("leg") in ("local", "fork"),
        fork_of=start.fork.of_room,
        num_forks=start.forks,
        priority=start.priority,
        cache_salt=start.cache_salt,
    )


def _leg(start: worker_pb2.Start, role: Role) -> PrefillPeer | DecodePeer | None:
    leg = start.WhichOneof("leg")
    if leg not in _LEGS[role]:
        raise _invalid("wrong_leg", f"leg={leg or 'none'} was sent to a {role.value} server, which takes leg={' or '.join(_LEGS[role])} only")
    if leg == "fork" and start.fork.of_room in (0, start.room):
        raise _invalid("wrong_leg", f"fork.of_room={start.fork.of_room} must be another room, whose prompt this one goes on behind")
    if leg == "prefill":
        if not start.prefill.decode_instance_id:
            raise _invalid("wrong_leg", "prefill.decode_instance_id is empty: name the decode server that may publish this room")
        return PrefillPeer(start.prefill.decode_instance_id)
    if leg == "decode":
        if not start.decode.bootstrap_address or not start.decode.prefill_instance_id:
            raise _invalid("wrong_leg", "decode.bootstrap_address and decode.prefill_instance_id must both be set")
        ticket = start.decode.ticket if start.decode.HasField("ticket") else None
        return DecodePeer(start.decode.bootstrap_address, start.decode.prefill_instance_id, ticket)
    return None


def _check_prompt(prompt: list[int], limits: Limits) -> None:
    if not prompt:
        raise _invalid("prompt_empty", "prompt_token_ids is empty, must have at least 1 token")
    highest = max(prompt)
    if highest >= limits.vocab_size:
        raise _invalid("token_out_of_range", f"prompt_token_ids has token {highest}, the model's vocabulary is [0, {limits.vocab_size})")


def _sampling(wire: worker_pb2.Sampling, num_prompt: int, limits: Limits) -> SamplingParams:
    room_left = limits.max_model_len - num_prompt
    if room_left < 1:
        raise _invalid("prompt_too_long", f"the prompt has {num_prompt} tokens, the model takes {limits.max_model_len}, the answer included")
    if not 1 <= wire.max_tokens <= room_left:
        raise _invalid(
            "max_tokens_out_of_range",
            f"sampling.max_tokens={wire.max_tokens} is outside [1, {room_left}]: the prompt has {num_prompt} of {limits.max_model_len} tokens",
        )
    if not (math.isfinite(wire.temperature) and wire.temperature >= 0):
        raise _invalid("sampling_out_of_range", f"sampling.temperature={wire.temperature} must be a number of at least 0")
    if not 0 < wire.top_p <= 1:
        raise _invalid("sampling_out_of_range", f"sampling.top_p={wire.top_p} is outside (0, 1]")
    if not 0 <= wire.min_p <= 1:
        raise _invalid("sampling_out_of_range", f"sampling.min_p={wire.min_p} is outside [0, 1]")
    if wire.min_tokens > wire.max_tokens:
        raise _invalid("sampling_out_of_range", f"sampling.min_tokens={wire.min_tokens} is above max_tokens={wire.max_tokens}")
    if len(wire.stop_token_ids) > MAX_STOP_TOKENS:
        raise _invalid("sampling_out_of_range", f"sampling.stop_token_ids has {len(wire.stop_token_ids)} tokens, the limit is {MAX_STOP_TOKENS}")
    if (highest := max(wire.stop_token_ids, default=0)) >= limits.vocab_size:
        raise _invalid("token_out_of_range", f"sampling.stop_token_ids has token {highest}, the model's vocabulary is [0, {limits.vocab_size})")
    _check_adjustments(wire, num_prompt, limits)
    _check_grammar(wire)
    return SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        stop_token_ids=frozenset(wire.stop_token_ids),
        repetition_penalty=wire.repetition_penalty or 1.0,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=tuple(zip(wire.bias_token_ids, wire.bias_values, strict=True)),
        top_logprobs=wire.top_logprobs if wire.HasField("top_logprobs") else None,
        prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
        answered_tokens=wire.answered_tokens,
    )


def _check_adjustments(wire: worker_pb2.Sampling, num_prompt: int, limits: Limits) -> None:
    low, high = REPETITION_PENALTY
    if wire.repetition_penalty and not _float32(low) <= wire.repetition_penalty <= high:
        raise _invalid("sampling_out_of_range", f"sampling.repetition_penalty={wire.repetition_penalty} is outside [{low}, {high}]")
    for name in ("presence_penalty", "frequency_penalty"):
        if not abs(getattr(wire, name)) <= MAX_PENALTY:
            raise _invalid("sampling_out_of_range", f"sampling.{name}={getattr(wire, name)} is outside [{-MAX_PENALTY}, {MAX_PENALTY}]")
    if len(wire.bias_token_ids) != len(wire.bias_values):
        text = f"sampling.bias_token_ids has {len(wire.bias_token_ids)} tokens and bias_values {len(wire.bias_values)} numbers: send one for each"
        raise _invalid("sampling_out_of_range", text)
    if len(wire.bias_token_ids) > MAX_BIASED_TOKENS:
        raise _invalid("sampling_out_of_range", f"sampling.bias_token_ids has {len(wire.bias_token_ids)} tokens, the limit is {MAX_BIASED_TOKENS}")
    if (highest := max(wire.bias_token_ids, default=0)) >= limits.vocab_size:
        raise _invalid("token_out_of_range", f"sampling.bias_token_ids has token {highest}, the model's vocabulary is [0, {limits.vocab_size})")
    for value in wire.bias_values:
        if not abs(value) <= MAX_BIAS:
            raise _invalid("sampling_out_of_range", f"sampling.bias_values has {value}, which is outside [{-MAX_BIAS}, {MAX_BIAS}]")
    for name in ("top_logprobs", "prompt_logprobs"):
        if getattr(wire, name) > MAX_TOP_LOGPROBS:
            raise _invalid("sampling_out_of_range", f"sampling.{name}={getattr(wire, name)} is above {MAX_TOP_LOGPROBS}")
    if wire.answered_tokens >= num_prompt:
        raise _invalid("sampling_out_of_range", f"sampling.answered_tokens={wire.answered_tokens} is not below the prompt's {num_prompt} tokens")


def _check_grammar(wire: worker_pb2.Sampling) -> None:
    if (num_bytes := len(wire.grammar.encode())) > MAX_GRAMMAR_BYTES:
        raise _invalid("grammar_too_large", f"sampling.grammar has {num_bytes} bytes, the limit is {MAX_GRAMMAR_BYTES}: shorten it")
    if wire.grammar and wire.min_tokens:
        raise _invalid(
            "sampling_out_of_range", f"sampling.min_tokens={wire.min_tokens} beside a grammar, which says itself how short an answer may be"
        )


def _float32(value: float) -> float:
    """As the wire carries it."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _check_pool(num_prompt: int, max_tokens: int, limits: Limits) -> None:
    num_tokens = num_prompt if limits.role is Role.PREFILL else num_prompt + max_tokens
    needed = -(-num_tokens // limits.page_size)
    if needed > limits.num_pages:
        what = "prompt" if limits.role is Role.PREFILL else "prompt and max_tokens"
        raise _invalid(
            "kv_pool_too_small",
            f"{what} need {needed} KV pages for {num_tokens} tokens, the {limits.role.value} server's pool has {limits.num_pages} pages of "
            f"{limits.page_size} tokens: shorten the request or start the server with a larger --num-pages",
        )


def _after(now: float, timeout_ms: int) -> float | None:
    return None if timeout_ms <= 0 else now + timeout_ms / 1e3


def _invalid(cause: str, message: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", cause, message)
