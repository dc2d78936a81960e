"""What is told of a request, a server or a pair: numbers, states and names. Never a prompt, a token's text or a key. Pure.

Times are whole milliseconds of the gateway's monotonic clock. An `operator` is told addresses, request ids and room numbers as well; a client's
key is not: a room's number may open a room where there are no tickets, and a request's id is another client's.
"""

from __future__ import annotations

import json
from hashlib import blake2s
from typing import Any

from baton.gateway.console.history import Ended
from baton.gateway.live_room import LiveRoom
from baton.gateway.report import room_report
from baton.gateway.retry import FailedAttempt
from baton.gateway.withheld import without_addresses
from baton.gateway.worker import Worker
from baton.wire.status import origin_name, stage_name
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

Row = dict[str, Any]

FOR_OPERATORS = ("room", "id")


def ms(at: float) -> int:
    """Seconds of the monotonic clock as they are told."""
    return round(at * 1e3)


def dump(value: object) -> bytes:
    """Compact; ASCII, so that no text of anybody can break the framing of events."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


class Names:
    """Short names for rooms and addresses that say nothing of them: a keyed hash, the key being this process's own."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt

    def room(self, number: int) -> str:
        return blake2s(number.to_bytes(8, "big"), key=self._salt, digest_size=4).hexdigest()

    def place(self, address: str) -> str:
        return blake2s(address.encode(), key=self._salt, digest_size=4).hexdigest()


# --- requests ---------------------------------------------------------------------------------------------------------------------


def live_row(room: LiveRoom) -> Row:
    """For operators."""
    passage, machine = room.passage, room.machine
    return {
        "state": machine.state.name,
        "accepted": ms(passage.accepted_at),
        "entered": ms(machine.entered[machine.state]),
        "prompt": room.num_prompt_tokens,
        "tokens": passage.num_tokens,
        "servers": list(passage.servers),
        "room": str(room.room),
    }


def withheld(row: Row) -> Row:
    """A row of a request without what only operators are told."""
    kept = {name: value for name, value in row.items() if name not in FOR_OPERATORS}
    if "failure" in row:
        kept["failure"] = row["failure"] | {"text": without_addresses(row["failure"]["text"])}
    if "attempts" in row:
        kept["attempts"] = [withheld(attempt) for attempt in row["attempts"]]
    return kept


def ended_row(one: Ended, names: Names) -> Row:
    """For operators. The waterfall's numbers are those of the report that the API returns: both are made by `room_report`."""
    usage = inference_pb2.Usage(prompt_tokens=one.prompt_tokens, completion_tokens=one.completion_tokens)
    report = room_report(one.room, one.machine, one.passage, usage, one.ended_at, one.attempts, one.num_recomputed)
    row: Row = {
        "n": one.number,
        "name": names.room(one.room),
        "at": ms(one.ended_at),
        "prompt": one.prompt_tokens,
        "tokens": one.completion_tokens,
        "finish": _finish_name(one.finish),
        "ttft": _round(report.ttft_ms),
        "itl": _round(report.mean_itl_ms),
        "total": _round(report.total_ms),
        "states": [[stage_name(span.state), _round(span.start_ms), _round(span.duration_ms)] for span in report.states],
        "marks": {event.value: _round((at - one.passage.accepted_at) * 1e3) for event, at in one.machine.milestones.items()},
        "servers": list(one.passage.servers),
        "local": report.prefilled_on_decode,
        "recomputed": report.recomputed_tokens,
        "room": str(one.room),
        "id": one.request_id,
    }
    if report.HasField("transfer"):
        row["transfer"] = _transfer(report.transfer)
    if one.failure is not None:
        row["failure"] = failure_row(one.failure)
    if one.attempts:
        row["attempts"] = [_attempt(attempt) for attempt in one.attempts]
    return row


def failure_row(failure: common_pb2.Failure) -> Row:
    return {
        "origin": origin_name(failure.origin),
        "stage": stage_name(failure.stage),
        "cause": failure.cause,
        "text": failure.message,
        "elapsed": failure.elapsed_ms,
        "allowed": failure.allowed_ms,
    }


def _attempt(attempt: FailedAttempt) -> Row:
    return {"servers": list(attempt.servers), "tokens": attempt.tokens_sent, "failure": failure_row(attempt.failure)}


def _transfer(transfer: inference_pb2.TransferReport) -> Row:
    return {
        "transport": transfer.transport,
        "bytes": transfer.bytes,
        "puts": transfer.puts,
        "duration": _round(transfer.duration_ms),
        "busy": _round(transfer.busy_ms),
        "exposed": _round(transfer.exposed_ms),
        "digest": transfer.digest_checked,
        "parts": [
            [part.queue, part.first_layer, part.num_layers, _round(part.start_ms), _round(part.duration_ms), part.bytes] for part in transfer.parts
        ],
    }


def _finish_name(finish: common_pb2.FinishReason.ValueType | None) -> str:
    return "" if finish is None else common_pb2.FinishReason.Name(finish).removeprefix("FINISH_REASON_").lower()


def _round(value_ms: float) -> float:
    return round(value_ms, 3)


# --- the fleet --------------------------------------------------------------------------------------------------------------------


def server_row(worker: Worker, num_rooms_elsewhere: int, *, operator: bool) -> Row:
    """num_rooms_elsewhere: rooms there of other processes of this gateway."""
    load, why = worker.load, worker.unusable_because or worker.avoided_because
    row: Row = {
        "role": worker.leg.value,
        "instance": worker.instance_id,
        "state": server_state(worker),
        "why": why if operator else without_addresses(why),
        "rooms": worker.num_rooms + num_rooms_elsewhere,
        "waiting": load.waiting,
        "running": load.running,
        "pages": {
            "total": load.total_pages,
            "free": load.free_pages,
            "cached": load.cached_pages,
            "reserved": load.reserved_pages,
            "published": load.published_pages,
            "quarantined": load.quarantined_pages,
        },
        "tokens": worker.tokens_in_flight,
        "prompt_rate": round(load.prompt_tokens_per_s),
    }
    return row | {"address": worker.address} if operator else row


def server_state(worker: Worker) -> str:
    """One word; `why` has the rest."""
    if not worker.connected:
        return "lost" if worker.info is not None else "connecting"
    if worker.draining:
        return "draining"
    if worker.leaving:
        return "leaving"
    if worker.unusable_because:
        return "stalled"
    if worker.avoided_because:
        return "silent" if worker.silent else "avoided"
    return "in use"


def pair_row(prefill: Worker, decode: Worker, path: worker_pb2.PeerState) -> Row:
    return {
        "prefill": prefill.instance_id,
        "decode": decode.instance_id,
        "transport": path.transport,
        "gb_per_s": round(path.gigabytes_per_s, 3),
    }
