"""How one request passed through the servers, for whoever asked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.retry import FailedAttempt
from baton.gateway.room import Event, Room
from baton.gateway.withheld import told
from baton.servicekit import Buckets
from baton.wire.v1 import inference_pb2


@dataclass(slots=True)
class Passage:
    """What is noted of one request on its way through a room. Times are the gateway's monotonic clock, in seconds.

    num_tokens: of the whole answer, those that came in earlier rooms included.
    """

    accepted_at: float
    prefill_instance: str = ""
    decode_instance: str = ""
    first_token_at: float | None = None
    last_token_at: float | None = None
    transfer: inference_pb2.TransferReport | None = None
    digest_checked: bool = False
    exposed_ms: float = 0.0
    ended_at: float | None = None
    num_tokens: int = 0
    #: Leading tokens of the room's prompt that a prefix cache had where it was computed.
    cached_tokens: int = 0
    #: Decode computes the prompt itself.
    prefilled_on_decode: bool = False
    #: Where the gaps between tokens are counted; None: nowhere.
    gaps: Buckets | None = None

    def follows(self, earlier: Passage) -> None:
        """This room goes on with the answer that was begun in another one: the client's tokens count from there."""
        self.first_token_at, self.last_token_at, self.num_tokens = earlier.first_token_at, earlier.last_token_at, earlier.num_tokens

    def token(self, at: float, num_tokens: int) -> None:
        """`num_tokens` more have come."""
        if self.last_token_at is None:
            self.first_token_at = at
        elif self.gaps is not None:
            self.gaps.add(at - self.last_token_at)
        if num_tokens > 1 and self.gaps is not None:
            self.gaps.add_zeros(num_tokens - 1)
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
    room: int,
    machine: Room,
    passage: Passage,
    usage: inference_pb2.Usage,
    now: float,
    failed: Sequence[FailedAttempt] = (),
    num_recomputed: int = 0,
) -> inference_pb2.RoomReport:
    """All times in milliseconds since the gateway accepted the request.

    failed: the request's rooms before this one. num_recomputed: tokens that the rooms after the first one were given to compute again.
    """
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
        failed_attempts=[_attempt(one) for one in failed],
        prefilled_on_decode=passage.prefilled_on_decode,
        recomputed_tokens=num_recomputed,
    )
    began, first = machine.milestones.get(Event.PREFILL_STARTED), passage.first_token_at
    if began is not None and (first is None or began <= first):
        report.prefill_started_ms = (began - passage.accepted_at) * 1e3
    if passage.transfer is not None:
        report.transfer.CopyFrom(passage.transfer)
        # Decode compares the digest and sees the doorbell: its word on both is the one that counts.
        report.transfer.digest_checked = passage.digest_checked
        report.transfer.exposed_ms = passage.exposed_ms or passage.transfer.exposed_ms
    return report


def _attempt(one: FailedAttempt) -> inference_pb2.FailedAttempt:
    return inference_pb2.FailedAttempt(
        room=one.room,
        prefill_instance=one.servers[0],
        decode_instance=one.servers[-1],
        failure=told(one.failure),
        tokens_sent=one.tokens_sent,
        prefilled_on_decode=one.prefilled_on_decode,
    )
