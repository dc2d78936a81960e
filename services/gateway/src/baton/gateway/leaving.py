"""Why rooms end before their answer is complete, as far as it is their client's doing, or the gateway's in its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from baton.gateway.attempts import Attempts
from baton.gateway.errors import GatewayError
from baton.gateway.live_room import LiveRoom
from baton.wire.status import code_number
from baton.wire.v1 import common_pb2


def cancel(every: Sequence[Attempts], why: Callable[[LiveRoom], common_pb2.Failure]) -> None:
    """Ends what still runs of a request's rooms. Where it is given up because one of them failed, that is why the others end."""
    failed = any(attempts.over for attempts in every)
    for attempts in every:
        failure = why(attempts.room)
        if failed and len(every) > 1 and failure.cause == "client_gone":
            failure = given_up(attempts.room)
        attempts.room.cancel(failure)


def client_gone(room: LiveRoom) -> common_pb2.Failure:
    return common_pb2.Failure(
        code=code_number(grpc.StatusCode.CANCELLED),
        origin=common_pb2.ORIGIN_CLIENT,
        stage=room.machine.state.value,
        cause="client_gone",
        message="the client left before the answer was complete",
    )


def given_up(room: LiveRoom) -> common_pb2.Failure:
    failure = client_gone(room)
    failure.origin, failure.cause = common_pb2.ORIGIN_GATEWAY, "other_answer_failed"
    failure.message = "another answer of the same request failed, and the request with it"
    return failure


def unread(room: LiveRoom, limit_s: float) -> common_pb2.Failure:
    failure = client_gone(room)
    failure.code = code_number(grpc.StatusCode.RESOURCE_EXHAUSTED)
    failure.cause = "slow_reader"
    failure.message = f"the client read nothing for {limit_s:g} s (--unread-timeout-s) while a part of its answer waited"
    failure.allowed_ms = round(limit_s * 1e3)
    return failure


def not_taken(room: LiveRoom) -> common_pb2.Failure:
    failure = client_gone(room)
    failure.code = code_number(grpc.StatusCode.DEADLINE_EXCEEDED)
    failure.cause = "slow_reader"
    failure.message = "the answer was complete, but the client had not read it by the request's deadline"
    return failure


def why_left(error: BaseException, room: LiveRoom) -> common_pb2.Failure:
    """Who ended a request whose handler was left by `error`."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit | OSError | GatewayError | grpc.aio.BaseError | asyncio.InvalidStateError):
        return client_gone(room)
    failure = client_gone(room)
    failure.code = code_number(grpc.StatusCode.INTERNAL)
    failure.origin = common_pb2.ORIGIN_GATEWAY
    failure.cause = "gateway_error"
    failure.message = f"the gateway failed while it answered: {type(error).__name__}"
    return failure
