"""The one table between the engine's plain types and the wire's messages."""

from __future__ import annotations

import grpc

from baton.engine.types import (
    Bootstrapped,
    EngineEvent,
    EngineStats,
    Failed,
    Failure,
    Finished,
    FinishReason,
    KVReady,
    Logprobs,
    PrefillStarted,
    PromptLogprobs,
    Reserved,
    Role,
    Transferred,
    TransferStarted,
    TransferStats,
)
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

ROLES = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE, Role.PLAIN: common_pb2.ROLE_PLAIN}

ORIGINS = {
    "client": common_pb2.ORIGIN_CLIENT,
    "gateway": common_pb2.ORIGIN_GATEWAY,
    "prefill": common_pb2.ORIGIN_PREFILL,
    "decode": common_pb2.ORIGIN_DECODE,
    "transfer": common_pb2.ORIGIN_TRANSFER,
}
_ORIGIN_NAMES = {number: name for name, number in ORIGINS.items()}

_REASONS = {FinishReason.STOP: common_pb2.FINISH_REASON_STOP, FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH}
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def failure_to_wire(failure: Failure) -> common_pb2.Failure:
    """Stage and times are the caller's to fill in."""
    return common_pb2.Failure(
        code=grpc.StatusCode[failure.code].value[0], origin=ORIGINS[failure.origin], cause=failure.cause, message=failure.message
    )


def failure_from_wire(failure: common_pb2.Failure, *, default_origin: str) -> Failure:
    """A code or origin that this side does not know becomes UNKNOWN and `default_origin`: a newer peer may have more of them."""
    return Failure(
        code=_CODES.get(failure.code, "UNKNOWN"),
        origin=_ORIGIN_NAMES.get(failure.origin, default_origin),
        cause=failure.cause or "unknown",
        message=failure.message,
    )


def logprobs_to_wire(room: int, index: int, logprobs: Logprobs) -> worker_pb2.RoomLogprobs:
    return worker_pb2.RoomLogprobs(room=room, index=index, logprobs=_of_token(logprobs))


def prompt_logprobs_to_wire(event: PromptLogprobs) -> worker_pb2.RoomPromptLogprobs:
    return worker_pb2.RoomPromptLogprobs(room=event.room, first=event.first, logprobs=[_of_token(each) for each in event.logprobs])


def _of_token(logprobs: Logprobs) -> inference_pb2.TokenLogprobs:
    tokens, values = zip(*logprobs.top, strict=True) if logprobs.top else ((), ())
    return inference_pb2.TokenLogprobs(logprob=logprobs.logprob, top_token_ids=tokens, top_logprobs=values, rank=logprobs.rank)


def transfer_to_wire(stats: TransferStats) -> inference_pb2.TransferReport:
    return inference_pb2.TransferReport(
        transport=stats.transport,
        bytes=stats.num_bytes,
        puts=stats.num_puts,
        duration_ms=stats.duration_s * 1e3,
        exposed_ms=stats.exposed_s * 1e3,
        digest_checked=stats.digest,
        busy_ms=stats.busy_s * 1e3,
        parts=[
            inference_pb2.TransferPart(
                queue=part.queue,
                first_layer=part.first_layer,
                num_layers=part.num_layers,
                start_ms=part.begin_s * 1e3,
                duration_ms=part.duration_s * 1e3,
                bytes=part.num_bytes,
            )
            for part in stats.parts
        ],
    )


def event_to_wire(event: EngineEvent, at_ms: float) -> worker_pb2.RoomEvent:
    """Any event but a token. `at_ms`: milliseconds since the worker took the Start."""
    wire = worker_pb2.RoomEvent(room=event.room, at_ms=at_ms)
    match event:
        case Bootstrapped():
            wire.bootstrapped.SetInParent()
        case Reserved():
            wire.reserved.pages, wire.reserved.resident_tokens = event.num_pages, event.resident_tokens
            wire.reserved.SetInParent()
        case PrefillStarted():
            wire.prefill_started.cached_tokens = event.cached_tokens
            wire.prefill_started.SetInParent()
        case TransferStarted():
            wire.transfer_started.SetInParent()
        case Transferred():
            wire.transferred.transfer.CopyFrom(transfer_to_wire(event.stats))
        case KVReady():
            wire.kv_ready.digest_checked, wire.kv_ready.exposed_ms = event.digest_checked, event.exposed_s * 1e3
            wire.kv_ready.first_token = event.first_token
            wire.kv_ready.SetInParent()
        case Finished():
            wire.finished.reason, wire.finished.completion_tokens = _REASONS[event.reason], event.completion_tokens
        case Failed():
            wire.failed.CopyFrom(failure_to_wire(event.failure))
        case _:
            raise TypeError(f"{type(event).__name__} is no room event")
    return wire


def load_to_wire(stats: EngineStats, stalled_s: float) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        total_pages=stats.total_pages,
        free_pages=stats.free_pages,
        cached_pages=stats.cached_pages,
        reserved_pages=stats.reserved_pages,
        published_pages=stats.published_pages,
        quarantined_pages=stats.quarantined_pages,
        rooms=stats.rooms,
        waiting=stats.waiting,
        running=stats.running,
        steps=stats.steps,
        tokens_in_flight=stats.tokens_in_flight,
        stalled_s=stalled_s,
        retractions=int(stats.extra.get("retractions", 0)),
        recomputed_tokens=int(stats.extra.get("recomputed_tokens", 0)),
        local_prefills=int(stats.extra.get("local_prefills", 0)),
        prompt_tokens_per_s=stats.extra.get("prompt_tokens_per_s", 0.0),
        pending_prompt_tokens=int(stats.extra.get("pending_prompt_tokens", 0)),
    )
