"""How one request passed through the servers, for whoever asked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.gateway.retry import FailedAttempt
from baton.gateway.room import Room
from baton.wire.v1 import inference_pb2


@dataclass(slots=True)
class Passage:
    """What is noted of one request on its way. Times are the gateway's monotonic clock, in seconds."""

    accepted_at: float
    prefill_instance: str = ""
    decode_instance: str = ""
    first_token_at: float | None = None
    last_token_at: float | None = None
    transfer: inference_pb2.TransferReport | None = None
    digest_checked: bool = False
    exposed_ms: float = 0.0
    ended_at: float | None = None
    num_tokens: int = field(default=0)

    def token(self, at: float, num_tokens: int) -> None:
        """`num_tokens` more have come."""
        if self.first_token_at is None:
            self.first_token_at = at
        self.last_token_at = at
        self.num_tokens += num_tokens

    @property
    def servers(self) -> tuple[str, ...]:
        """The instances it runs on, prefill first; one for a plain server."""
        return tuple(dict.fromkeys((self.prefill_instance, self.decode_instance)))

    @property
    def ttft_ms(self) -> float:
        return 0.0 if self.first_token_at is None else (self.first_token_at - self.accepted_at) * 1e3

    @property
    def mean_itl_ms(self) -> float:
        """Mean time between two tokens; 0 for an answer of fewer than two."""
        if self.first_token_at is None or self.last_token_at is None or self.num_tokens < 2:
            return 0.0
        return (self.last_token_at - self.first_token_at) * 1e3 / (self.num_tokens - 1)


def room_report(
    room: int, machine: Room, passage: Passage, usage: inference_pb2.Usage, now: float, failed: Sequence[FailedAttempt] = ()
) -> inference_pb2.RoomReport:
    """All times in milliseconds since the gateway accepted the request. `failed`: the request's rooms before this one."""
    end = now if passage.ended_at is None else passage.ended_at
    report = inference_pb2.RoomReport(
        room=room,
        prefill_instance=passage.prefill_instance,
        decode_instance=passage.decode_instance,
        states=[
            inference_pb2.StateSpan(state=state, start_ms=(entered - passage.accepted_at) * 1e3, duration_ms=(left - entered) * 1e3)  # type: ignore[arg-type]
            for state, entered, left in machine.spans(end)
        ],
        ttft_ms=passage.ttft_ms,
        mean_itl_ms=passage.mean_itl_ms,
        total_ms=(end - passage.accepted_at) * 1e3,
        usage=usage,
        failed_attempts=[
            inference_pb2.FailedAttempt(room=one.room, prefill_instance=one.servers[0], decode_instance=one.servers[-1], failure=one.failure)
            for one in failed
        ],
    )
    if passage.transfer is not None:
        report.transfer.CopyFrom(passage.transfer)
        # Decode compares the digest and sees the doorbell: its word on both is the one that counts.
        report.transfer.digest_checked = passage.digest_checked
        report.transfer.exposed_ms = passage.exposed_ms or passage.transfer.exposed_ms
    return report
