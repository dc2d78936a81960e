"""When a server is left alone, and what may be tried again where: pure policy."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.breaker import FIRST_PAUSE_S, MAX_PAUSE_S, THRESHOLD, Breaker
from baton.gateway.retry import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    FailedAttempt,
    RetryPolicy,
    backoff_s,
    is_chargeable,
    is_retryable,
)
from baton.wire.status import code_number
from baton.wire.v1 import common_pb2


def opened() -> Breaker:
    breaker = Breaker(jitter=lambda: 1.0)
    for _ in range(THRESHOLD):
        breaker.failed(0.0)
    return breaker


def test_it_opens_at_the_threshold_and_a_success_starts_the_count_again() -> None:
    breaker = Breaker(jitter=lambda: 1.0)
    for _ in range(3):
        assert [breaker.failed(0.0) for _ in range(THRESHOLD - 1)] == [False] * (THRESHOLD - 1)
        breaker.succeeded()
    assert breaker.allows(0.0)
    assert [breaker.failed(0.0) for _ in range(THRESHOLD)][-1]
    assert breaker.is_open
    assert not breaker.allows(FIRST_PAUSE_S - 0.01)


def test_after_the_pause_one_request_finds_out() -> None:
    breaker = opened()
    assert breaker.allows(FIRST_PAUSE_S)
    breaker.chosen(FIRST_PAUSE_S)
    assert not breaker.allows(FIRST_PAUSE_S)
    breaker.succeeded()
    assert breaker.allows(FIRST_PAUSE_S)
    assert not breaker.is_open


def test_a_probe_that_says_nothing_does_not_keep_it_closed_for_ever() -> None:
    breaker = opened()
    breaker.chosen(FIRST_PAUSE_S)
    assert not breaker.allows(1.9 * FIRST_PAUSE_S)
    assert breaker.allows(2 * FIRST_PAUSE_S)


def test_each_failed_probe_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now, pause_s = opened(), FIRST_PAUSE_S, FIRST_PAUSE_S
    for _ in range(10):
        breaker.chosen(now)
        assert breaker.failed(now)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
        assert not breaker.allows(now + pause_s - 0.01)
        now += pause_s
        assert breaker.allows(now)


def test_what_was_sent_before_it_opened_does_not_lengthen_the_pause() -> None:
    breaker = opened()
    assert not any(breaker.failed(0.5) for _ in range(50))
    assert breaker.allows(FIRST_PAUSE_S)


def failure(code: grpc.StatusCode, origin: common_pb2.Origin.ValueType = common_pb2.ORIGIN_DECODE) -> common_pb2.Failure:
    return common_pb2.Failure(code=code_number(code), origin=origin, cause="c")


RETRYABLE = {getattr(grpc.StatusCode, name) for name in ("ABORTED", "DATA_LOSS", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE")}


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_only_a_servers_failure_is_tried_again(code: grpc.StatusCode) -> None:
    for origin in (common_pb2.ORIGIN_PREFILL, common_pb2.ORIGIN_DECODE, common_pb2.ORIGIN_TRANSFER):
        assert is_retryable(failure(code, origin)) is (code in RETRYABLE)
    for origin in (common_pb2.ORIGIN_CLIENT, common_pb2.ORIGIN_GATEWAY, common_pb2.ORIGIN_UNSPECIFIED):
        assert not is_retryable(failure(code, origin))


def test_overload_is_not_failure() -> None:
    assert is_chargeable(failure(grpc.StatusCode.UNAVAILABLE))
    assert not is_chargeable(failure(grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert not is_chargeable(failure(grpc.StatusCode.INVALID_ARGUMENT))


@pytest.mark.parametrize(
    ("origin", "free"),
    [
        (common_pb2.ORIGIN_PREFILL, {("p2", "d1"), ("p2", "d2"), ("x",)}),
        (common_pb2.ORIGIN_DECODE, {("p1", "d2"), ("p2", "d2"), ("x",)}),
        (common_pb2.ORIGIN_TRANSFER, {("p1", "d2"), ("p2", "d1"), ("p2", "d2"), ("x",)}),
    ],
)
def test_the_leg_that_failed_is_excluded_or_else_the_pair(origin: common_pb2.Origin.ValueType, free: set[tuple[str, ...]]) -> None:
    attempt = FailedAttempt(1, ("p1", "d1"), failure(grpc.StatusCode.UNAVAILABLE, origin))
    routes = [(prefill, decode) for prefill in ("p1", "p2") for decode in ("d1", "d2")]
    assert {route for route in [*routes, ("x",)] if not attempt.excludes(route)} == free


def test_a_way_that_broke_speaks_against_nobody() -> None:
    """It is laid anew, if need be between the same two."""
    broke = common_pb2.Failure(code=code_number(grpc.StatusCode.UNAVAILABLE), origin=common_pb2.ORIGIN_TRANSFER, cause="way_lost")
    assert is_retryable(broke)
    assert not FailedAttempt(1, ("p1", "d1"), broke).excludes(("p1", "d1"))


def test_a_plain_server_that_failed_is_excluded() -> None:
    attempt = FailedAttempt(1, ("x",), failure(grpc.StatusCode.UNAVAILABLE))
    assert attempt.excludes(("x",))
    assert not attempt.excludes(("y",))


@given(st.integers(1, 50))
def test_the_backoff_is_bounded_and_jittered(num_failed: int) -> None:
    most_s = min(FIRST_BACKOFF_S * 2.0 ** (num_failed - 1), MAX_BACKOFF_S)
    pauses = [backoff_s(num_failed) for _ in range(20)]
    assert all(most_s / 2 <= pause <= most_s for pause in pauses)
    assert len(set(pauses)) > 1


def test_once_decode_has_spoken_only_recompute_goes_on() -> None:
    fail, recompute = RetryPolicy(2), RetryPolicy(2, "recompute")
    lost = failure(grpc.StatusCode.UNAVAILABLE)
    assert [fail.allows(lost, 0, tokens) for tokens in (0, 1, 2)] == [True, True, False]
    assert [recompute.allows(lost, 0, tokens) for tokens in (0, 1, 2, 1000)] == [True] * 4
    assert [recompute.allows(lost, failed, 5) for failed in (0, 1, 2)] == [True, True, False]
    assert not recompute.allows(failure(grpc.StatusCode.DEADLINE_EXCEEDED), 0, 0)
    conflict = common_pb2.Failure(code=code_number(grpc.StatusCode.INTERNAL), origin=common_pb2.ORIGIN_TRANSFER, cause="token_conflict")
    assert [recompute.allows(conflict, 0, tokens) for tokens in (0, 1)] == [True, False]


def test_a_transfer_that_took_too_long_is_recomputed_and_no_other_limit_is() -> None:
    for cause, goes_on in (("transfer_timeout", True), ("waiting_timeout", False), ("bootstrap_timeout", False), ("deadline", False)):
        late = common_pb2.Failure(code=code_number(grpc.StatusCode.DEADLINE_EXCEEDED), origin=common_pb2.ORIGIN_GATEWAY, cause=cause)
        assert RetryPolicy(2, "recompute").allows(late, 0, 1) is goes_on
        assert not RetryPolicy(2).allows(late, 0, 1)


@pytest.mark.parametrize(
    ("origin", "stage", "hearsay", "alone"),
    [
        ("PREFILL", "BOOTSTRAPPING", False, False),  # nothing was computed yet: another pair does as well
        ("PREFILL", "WAITING", True, False),
        ("PREFILL", "TRANSFERRING", False, True),
        ("PREFILL", "TRANSFERRING", True, True),
        ("PREFILL", "SUCCESS", False, True),
        ("TRANSFER", "WAITING", False, True),
        ("TRANSFER", "SUCCESS", False, True),
        ("DECODE", "TRANSFERRING", False, False),
        ("DECODE", "TRANSFERRING", True, True),  # prefill has lost it, which need not be its own fault
        ("DECODE", "SUCCESS", False, False),
    ],
)
def test_decode_is_well_when_only_its_pages_did_not_come(origin: str, stage: str, hearsay: bool, alone: bool) -> None:
    said = common_pb2.Failure(origin=common_pb2.Origin.Value(f"ORIGIN_{origin}"), stage=common_pb2.RoomState.Value(f"ROOM_STATE_{stage}"))
    assert FailedAttempt(1, ("p1", "d1"), said, hearsay=hearsay).only_transfer_failed is alone


def test_what_one_server_says_of_the_other_excludes_only_the_pair() -> None:
    """The way between them may be what broke."""
    for origin in (common_pb2.ORIGIN_PREFILL, common_pb2.ORIGIN_DECODE):
        attempt = FailedAttempt(1, ("p1", "d1"), failure(grpc.StatusCode.UNAVAILABLE, origin), hearsay=True)
        assert attempt.excludes(("p1", "d1"))
        assert not any(attempt.excludes(servers) for servers in (("p1", "d2"), ("p2", "d1"), ("d1",)))
