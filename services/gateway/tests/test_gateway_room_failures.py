"""Every failure says who ended the room, where, why, after how long and of how much, whoever made it."""

from __future__ import annotations

import time

import grpc
import pytest

from baton.gateway.room import Event, Room
from baton.gateway.room_failures import FailureScribe, cut_off
from baton.gateway.worker import Leg
from baton.wire.status import code_number
from baton.wire.v1 import common_pb2

UNAVAILABLE = code_number(grpc.StatusCode.UNAVAILABLE)


@pytest.fixture
def scribe() -> FailureScribe:
    """Of a room in WAITING, a tenth of a second after its request was accepted, which has 5 s altogether."""
    now = time.monotonic()
    machine = Room.split(now)
    machine.apply(Event.BOOTSTRAPPED, now)
    return FailureScribe(machine, now - 0.1, now + 4.9)


def test_the_gateways_own_failure_is_whole(scribe: FailureScribe) -> None:
    failure = scribe.make(grpc.StatusCode.DEADLINE_EXCEEDED, common_pb2.ORIGIN_GATEWAY, "waiting_timeout", "late", allowed_s=2.0)
    assert (failure.stage, failure.allowed_ms) == (common_pb2.ROOM_STATE_WAITING, 2000)
    assert failure.elapsed_ms >= 100
    assert scribe.make(grpc.StatusCode.INTERNAL, common_pb2.ORIGIN_GATEWAY, "x", "y").allowed_ms == 5000


def test_a_failure_without_a_place_gets_it(scribe: FailureScribe) -> None:
    failure = scribe.placed(common_pb2.Failure(code=UNAVAILABLE, origin=common_pb2.ORIGIN_CLIENT, cause="client_gone"))
    assert (failure.origin, failure.stage, failure.allowed_ms) == (common_pb2.ORIGIN_CLIENT, common_pb2.ROOM_STATE_WAITING, 5000)
    assert failure.elapsed_ms >= 100
    assert scribe.placed(common_pb2.Failure(cause="stop_string")).origin == common_pb2.ORIGIN_GATEWAY


def test_a_workers_failure_is_told_in_the_requests_times(scribe: FailureScribe) -> None:
    """It counts from when it heard of the room, and sees its own half of it."""
    said = common_pb2.Failure(code=UNAVAILABLE, cause="engine_failed", stage=common_pb2.ROOM_STATE_BOOTSTRAPPING, elapsed_ms=3)
    failure = scribe.of_worker(said, Leg.DECODE)
    assert (failure.origin, failure.stage, failure.allowed_ms) == (common_pb2.ORIGIN_DECODE, common_pb2.ROOM_STATE_WAITING, 5000)
    assert failure.elapsed_ms >= 100
    limit = scribe.of_worker(common_pb2.Failure(cause="bootstrap_timeout", elapsed_ms=303, allowed_ms=300), Leg.PREFILL)
    assert (limit.origin, limit.elapsed_ms, limit.allowed_ms) == (common_pb2.ORIGIN_PREFILL, 303, 300)


PAIR = (Leg.PREFILL, Leg.DECODE)


@pytest.mark.parametrize(
    ("told_by", "legs", "cut"),
    [(Leg.PREFILL, PAIR, Leg.DECODE), (Leg.DECODE, PAIR, Leg.PREFILL), (Leg.PLAIN, (Leg.PLAIN,), Leg.PLAIN)],
)
def test_who_hears_that_it_is_lost_itself_has_lost_the_other_server(told_by: Leg, legs: tuple[Leg, ...], cut: Leg) -> None:
    assert cut_off(common_pb2.Failure(origin=common_pb2.ORIGIN_GATEWAY, cause="gateway_lost"), told_by, legs) is cut


@pytest.mark.parametrize(("origin", "cause"), [(common_pb2.ORIGIN_GATEWAY, "deadline"), (common_pb2.ORIGIN_DECODE, "decode_lost")])
def test_what_else_a_server_says_cuts_nobody_off(origin: common_pb2.Origin.ValueType, cause: str) -> None:
    assert cut_off(common_pb2.Failure(origin=origin, cause=cause), Leg.PREFILL, PAIR) is None
