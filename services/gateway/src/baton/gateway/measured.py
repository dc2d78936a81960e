"""Floats that servers report: what cannot be goes no further than here, or it would stand in JSON that nobody can read. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import Message

from baton.wire.v1 import inference_pb2, worker_pb2

#: Of seconds, milliseconds, tokens a second and gigabytes a second.
LARGEST = 1e12

_FIELDS: dict[type[Message], tuple[str, ...]] = {
    worker_pb2.WorkerLoad: ("stalled_s", "prompt_tokens_per_s"),
    worker_pb2.PeerState: ("gigabytes_per_s",),
    worker_pb2.RoomEvent: ("at_ms",),
    worker_pb2.KvReady: ("exposed_ms",),
    inference_pb2.TransferReport: ("duration_ms", "exposed_ms", "busy_ms"),
    inference_pb2.TransferPart: ("start_ms", "duration_ms"),
}


@dataclass(frozen=True, slots=True)
class Impossible:
    """A number that a server reported. field: as "WorkerLoad.stalled_s"."""

    field: str
    value: float
    limit: str


def clean_info(info: worker_pb2.WorkerInfo) -> list[Impossible]:
    """As `clean_report`."""
    return list(_clean(info.load))


def clean_report(report: worker_pb2.Report) -> list[Impossible]:
    """Changes `report`: a measure outside [0, LARGEST] is 0, as if it had not been told, and a stall beyond LARGEST is LARGEST.

    Log probabilities with one that is not finite are taken out, and the room that lacks them fails. Returns what was found.
    """
    found = [*_clean(report.load)] if report.HasField("load") else []
    for peer in report.peers.peers:
        found += _clean(peer)
    for event in report.events:
        found += _clean(event)
        kind = event.WhichOneof("event")
        if kind == "kv_ready":
            found += _clean(event.kv_ready)
        elif kind == "transferred":
            found += _clean(event.transferred.transfer)
            for part in event.transferred.transfer.parts:
                found += _clean(part)
    for number in reversed(range(len(report.logprobs))):
        if wrong := _not_finite(report.logprobs[number].logprobs):
            found.append(wrong)
            del report.logprobs[number]
    for number in reversed(range(len(report.prompt_logprobs))):
        if wrong := next(filter(None, map(_not_finite, report.prompt_logprobs[number].logprobs)), None):
            found.append(wrong)
            del report.prompt_logprobs[number]
    return found


def _clean(said: Message) -> Iterator[Impossible]:
    for name in _FIELDS[type(said)]:
        value = getattr(said, name)
        if not 0 <= value <= LARGEST:  # nor is it where it is no number
            yield Impossible(f"{type(said).__name__}.{name}", value, f"[0, {LARGEST:g}]")
            setattr(said, name, LARGEST if name == "stalled_s" and value > LARGEST else 0.0)


def _not_finite(said: inference_pb2.TokenLogprobs) -> Impossible | None:
    """The first one."""
    if math.isfinite(said.logprob + sum(said.top_logprobs)):
        return None
    if not math.isfinite(said.logprob):
        return Impossible("TokenLogprobs.logprob", said.logprob, "finite numbers")
    return Impossible("TokenLogprobs.top_logprobs", next(value for value in said.top_logprobs if not math.isfinite(value)), "finite numbers")
