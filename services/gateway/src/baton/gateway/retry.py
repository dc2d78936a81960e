"""Whether a room that failed may be tried again, where not, and how soon. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from baton.wire.status import origin_name, status_code
from baton.wire.v1 import common_pb2

#: A server that is full is another matter than a request that is wrong: elsewhere there may be room.
_SERVER_CODES = frozenset(
    (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS),
)
_SERVER_ORIGINS = frozenset((common_pb2.ORIGIN_PREFILL, common_pb2.ORIGIN_DECODE, common_pb2.ORIGIN_TRANSFER))

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


def is_retryable(failure: common_pb2.Failure) -> bool:
    """A server's failure or its lack of room: never the client's mistake, a deadline, or the gateway's own decision."""
    return failure.origin in _SERVER_ORIGINS and status_code(failure.code) in _SERVER_CODES


def is_chargeable(failure: common_pb2.Failure) -> bool:
    """Whether it speaks against the server's health. Overload does not."""
    return is_retryable(failure) and status_code(failure.code) is not grpc.StatusCode.RESOURCE_EXHAUSTED


def backoff_s(num_failed: int) -> float:
    """Seconds to wait after that many failed attempts: doubled each time, and jittered."""
    return min(FIRST_BACKOFF_S * 2.0 ** (num_failed - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A room of a request that was tried again. `servers`: the instances it ran on, prefill first; one for a plain server."""

    room: int
    servers: tuple[str, ...]
    failure: common_pb2.Failure

    @property
    def culprit(self) -> str:
        """The instance that failed; empty where only the pair is known to have."""
        if self.failure.origin == common_pb2.ORIGIN_PREFILL:
            return self.servers[0]
        return self.servers[-1] if self.failure.origin == common_pb2.ORIGIN_DECODE else ""

    def excludes(self, servers: Sequence[str]) -> bool:
        """Whether this request is not to be tried on `servers` (instance ids, prefill first) again."""
        culprit = self.culprit
        return culprit in servers if culprit else tuple(servers) == self.servers

    def why(self) -> str:
        """In a few words, for the log and for the client."""
        return f"{self.failure.cause} ({origin_name(self.failure.origin)}) on {' and '.join(self.servers)}"
