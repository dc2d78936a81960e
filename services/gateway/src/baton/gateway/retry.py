"""Whether a request whose room failed goes on, where, where not, and how soon. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import grpc

from baton.wire.status import origin_name, status_code
from baton.wire.v1 import common_pb2

#: A server that is full is another matter than a request that is wrong: elsewhere there may be room.
_SERVER_CODES = frozenset(
    (
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    )
)
_SERVER_ORIGINS = frozenset((common_pb2.ORIGIN_PREFILL, common_pb2.ORIGIN_DECODE, common_pb2.ORIGIN_TRANSFER))

#: What becomes of a request whose KV cache is lost: it fails, or what is lost is computed again.
KVLoadFailurePolicy = Literal["fail", "recompute"]

#: Tokens that the client may have when its request goes on under policy "fail": prefill's first one is sent before decode has anything.
MAX_SENT_UNLESS_RECOMPUTED = 1

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


def is_retryable(failure: common_pb2.Failure) -> bool:
    """A server's failure or its lack of room: never the client's mistake, a deadline, or the gateway's own decision."""
    return failure.origin in _SERVER_ORIGINS and status_code(failure.code) in _SERVER_CODES


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`retries`: rooms that a request may have after its first one."""

    retries: int
    kv_load_failure: KVLoadFailurePolicy = "fail"

    @property
    def recomputes(self) -> bool:
        return self.kv_load_failure == "recompute"

    def allows(self, failure: common_pb2.Failure, num_failed: int, tokens_sent: int) -> bool:
        """Whether there may be another room after this failure, and `num_failed` others before it, with so many tokens of the answer made.

        Servers that named different tokens for one place leave nothing to go on behind.
        """
        if num_failed >= self.retries or not (self.recomputes or tokens_sent <= MAX_SENT_UNLESS_RECOMPUTED):
            return False
        if failure.cause == "token_conflict" and tokens_sent:
            return False
        return is_retryable(failure) or (self.recomputes and failure.cause == "transfer_timeout")


def is_chargeable(failure: common_pb2.Failure) -> bool:
    """Whether it speaks against the server's health. Overload does not."""
    return is_retryable(failure) and not is_overload(failure)


def is_overload(failure: common_pb2.Failure) -> bool:
    return status_code(failure.code) is grpc.StatusCode.RESOURCE_EXHAUSTED


def backoff_s(num_failed: int) -> float:
    """Seconds to wait after that many failed attempts: doubled each time, and jittered."""
    return min(FIRST_BACKOFF_S * 2.0 ** (num_failed - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1.0)


def is_way_lost(failure: common_pb2.Failure) -> bool:
    """Prefill and decode are well; what pages went over between them broke."""
    return failure.cause == "way_lost"


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A room of a request that went on in another one.

    servers: the instances it ran on, prefill first; one where a single server did both. tokens_sent: tokens of the answer that were made by then.
    hearsay: one server said it of the other, which proves no more than that the two have lost each other.
    """

    room: int
    servers: tuple[str, ...]
    failure: common_pb2.Failure
    tokens_sent: int = 0
    prefilled_on_decode: bool = False
    hearsay: bool = False

    @property
    def only_transfer_failed(self) -> bool:
        """Decode is well, and waits for KV pages that will not come, or came damaged, after prefill had begun to write them."""
        failure = self.failure
        if failure.origin == common_pb2.ORIGIN_TRANSFER or failure.cause == "transfer_timeout":
            return True
        if failure.origin == common_pb2.ORIGIN_DECODE:
            return self.hearsay
        return failure.origin == common_pb2.ORIGIN_PREFILL and failure.stage in (common_pb2.ROOM_STATE_TRANSFERRING, common_pb2.ROOM_STATE_SUCCESS)

    @property
    def is_way_lost(self) -> bool:
        return is_way_lost(self.failure)

    @property
    def culprit(self) -> str:
        """The instance that failed; empty where only the pair is known to have."""
        if self.hearsay:
            return ""
        if self.failure.origin == common_pb2.ORIGIN_PREFILL:
            return self.servers[0]
        return self.servers[-1] if self.failure.origin == common_pb2.ORIGIN_DECODE else ""

    def excludes(self, servers: Sequence[str]) -> bool:
        """Whether this request is not to be tried on `servers` (instance ids, prefill first) again. A way that broke is laid anew."""
        if self.is_way_lost:
            return False
        culprit = self.culprit
        return culprit in servers if culprit else tuple(servers) == self.servers

    def why(self) -> str:
        """In a few words, for the log and for the client."""
        return f"{self.failure.cause} ({origin_name(self.failure.origin)}) on {' and '.join(self.servers)}"
