"""A server fails before the first token: the request goes on elsewhere and the client learns nothing of it. Otherwise it is told at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, failure_of, greedy, rest, says, serving
from gateway_worker import Script, ScriptedWorker, by_the_book, silence

from baton.gateway.breaker import THRESHOLD
from baton.wire.v1 import common_pb2, worker_pb2

StackOf = Callable[..., Any]

ANSWER = "the answer is forty two"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def two_by_two(stack_of: StackOf, **settings: Any) -> Stack:
    stack: Stack = await stack_of(prefill=2, decode=2, **settings)
    await eventually(lambda: len(stack.gateway.fleet.routes) == 4)
    return stack


def failing(code: grpc.StatusCode, cause: str = "scripted", **more: Any) -> Script:
    async def script(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        worker.fail(start.room, code, cause, **more)

    return script


def num_starts(stack: Stack, role: str) -> int:
    return sum(len(worker.starts) for worker in stack.workers if worker.role == role)


PROGRESS = ["BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS"]


@pytest.mark.parametrize("state", PROGRESS)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_server_lost_before_the_first_token_is_not_noticed(stack_of: StackOf, victim: str, state: str) -> None:
    """Also when decode has the KV cache already, and even a later token: prefill's first one had not come."""
    stack = await two_by_two(stack_of)
    stack.script(silence, silence)
    call = stack.call()
    await call.read()
    prefill, decode = await serving(stack, "prefill"), await serving(stack, "decode")
    first = prefill.starts[0]
    if state != "BOOTSTRAPPING":
        prefill.event(first.room, bootstrapped=worker_pb2.Bootstrapped())
    if state in ("TRANSFERRING", "SUCCESS"):
        prefill.event(first.room, transfer_started=worker_pb2.TransferStarted())
    if state == "SUCCESS":
        decode.event(first.room, kv_ready=worker_pb2.KvReady())
        decode.tokens(first.room, 1, [99])
    await eventually(lambda: stack.gateway.rooms._rooms[first.room].machine.state.name == state)
    stack.script(by_the_book, by_the_book)
    lost, other = (prefill, decode) if victim == "prefill" else (decode, prefill)
    await lost.kill()
    messages = await rest(call)
    assert "".join(message.text for message in messages) == ANSWER
    report = messages[-1].report
    assert [one.room for one in report.failed_attempts] == [first.room]
    failed = report.failed_attempts[0]
    assert (failed.prefill_instance, failed.decode_instance) == (prefill.instance_id, decode.instance_id)
    assert (failed.failure.cause, common_pb2.RoomState.Name(failed.failure.stage)) == (f"{victim}_lost", f"ROOM_STATE_{state}")
    assert report.room != first.room
    assert lost.instance_id not in (report.prefill_instance, report.decode_instance)
    await other.wait(lambda: any(abort.room == first.room for abort in other.aborts))
    await stack.settled()
    rooms = stack.gateway.rooms
    assert rooms.retries == {(victim, state, f"{victim}_lost"): 1}
    assert rooms.outcomes == {"success": 1, (victim, state, f"{victim}_lost"): 1}


async def test_every_attempt_is_the_same_request_in_another_room(stack_of: StackOf) -> None:
    """The seed that was drawn stays, so that tokens are those that the first attempt would have had; the deadline is the first one's."""
    stack = await two_by_two(stack_of)
    stack.script(silence, failing(UNAVAILABLE))
    call = stack.call(ask(sampling=greedy(temperature=1.0)), timeout=15)
    await failure_of(call)
    starts = sorted((start for worker in stack.workers if worker.role == "prefill" for start in worker.starts), key=lambda start: -start.deadline_ms)
    assert len(starts) == 2  # there are two decode servers, and both have failed
    assert len({start.room for start in starts}) == 2
    assert len({start.sampling.seed for start in starts}) == 1
    assert len({tuple(start.prompt_token_ids) for start in starts}) == 1
    assert 15_100 >= starts[0].deadline_ms > starts[1].deadline_ms  # gRPC sends three digits, rounded up
    await stack.settled()


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (1, 2), (2, 3)])
async def test_attempts_are_bounded_and_the_last_failure_tells_of_them(stack_of: StackOf, retries: int, attempts: int) -> None:
    stack: Stack = await stack_of(plain=5, retries=retries)
    await eventually(lambda: len(stack.gateway.fleet.routes) == 5)
    stack.script(None, failing(UNAVAILABLE, "broken", message="out of order"))
    code, failure = await failure_of(stack.call())
    assert (code, failure.cause) == (UNAVAILABLE, "broken")
    assert num_starts(stack, "plain") == attempts
    assert max(len(worker.starts) for worker in stack.workers) == 1
    assert (f"attempt {attempts} of at most {attempts}" in failure.message) is (attempts > 1)
    assert failure.message.count("broken (decode) on plain-") == attempts - 1
    await stack.settled()
    assert sum(stack.gateway.rooms.retries.values()) == attempts - 1


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.PERMISSION_DENIED])
async def test_a_clients_mistake_and_a_deadline_are_told_at_once(stack_of: StackOf, code: grpc.StatusCode) -> None:
    stack = await two_by_two(stack_of)
    stack.script(silence, failing(code))
    assert (await failure_of(stack.call()))[0] is code
    assert num_starts(stack, "decode") == 1
    await stack.settled()


async def test_the_requests_deadline_ends_it_wherever_it_is(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of, request_timeout_s=0.5)
    stack.script(silence, silence)
    code, failure = await failure_of(stack.call())
    assert (code, failure.cause) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline")
    assert num_starts(stack, "decode") == 1


async def hand_over(stack: Stack, first: list[int]) -> tuple[Any, ScriptedWorker, ScriptedWorker]:
    """A call that has prefill's first token, and its servers."""
    stack.script(silence, silence)
    call = stack.call()
    await call.read()
    prefill, decode = await serving(stack, "prefill"), await serving(stack, "decode")
    prefill.tokens(prefill.starts[0].room, 0, first)
    assert (await call.read()).token_ids == first
    return call, prefill, decode


async def test_decode_lost_after_prefills_token_is_not_noticed_either(stack_of: StackOf) -> None:
    """The client has one token, decode none: the next pair goes on behind it, and the client does not get it twice."""
    stack = await two_by_two(stack_of)
    answer = says(stack.tokenizer, ANSWER)
    call, _, decode = await hand_over(stack, answer[:1])
    had_at_ms = next(iter(stack.gateway.rooms._rooms.values())).passage.ttft_ms
    stack.script(by_the_book, by_the_book)
    await decode.kill()
    messages = await rest(call)
    assert [token for message in messages for token in message.token_ids] == answer[1:]
    assert "".join(message.text for message in messages) == stack.tokenizer.decode(answer[1:])
    report = messages[-1].report
    assert len(report.failed_attempts) == 1
    assert report.ttft_ms == pytest.approx(had_at_ms)  # when the client got it, not when it was computed again
    assert messages[-1].usage.completion_tokens == len(answer)
    await stack.settled()


async def test_the_next_pair_goes_on_behind_the_token_that_the_client_has(stack_of: StackOf) -> None:
    """It is told that token, so it need not draw it again, and cannot draw another one."""
    stack = await two_by_two(stack_of)
    call, prefill, decode = await hand_over(stack, [99])
    first = prefill.starts[0]
    stack.script(by_the_book, by_the_book)
    await decode.kill()
    await rest(call)
    (start,) = [start for worker in stack.workers if worker.role == "decode" for start in worker.starts if start.room != first.room]
    assert list(start.prompt_token_ids) == [*first.prompt_token_ids, 99]
    assert start.sampling.max_tokens == first.sampling.max_tokens - 1
    assert start.sampling.seed == first.sampling.seed
    await stack.settled()


async def test_after_decodes_first_token_a_failure_is_told(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of)
    stack.script(silence, silence)
    call = stack.call()
    await call.read()
    prefill, decode = await serving(stack, "prefill"), await serving(stack, "decode")
    prefill.tokens(prefill.starts[0].room, 0, [100])
    assert (await call.read()).token_ids == [100]
    decode.tokens(decode.starts[0].room, 1, [101])
    assert (await call.read()).token_ids == [101]
    await decode.kill()
    code, failure = await failure_of(call)
    assert (code, failure.cause) == (UNAVAILABLE, "decode_lost")
    assert num_starts(stack, "decode") == 1
    await stack.settled()


async def test_a_full_server_is_no_failed_one_and_another_takes_the_request(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of)
    stack.of("decode", 0).script = failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "kv_pool_full")
    replies = [await stack.reply() for _ in range(4 * THRESHOLD)]
    assert {reply.text for reply in replies} == {ANSWER}
    assert {reply.last.report.decode_instance for reply in replies} == {"decode-1"}
    assert any(reply.last.report.failed_attempts for reply in replies)
    assert not any(worker.breaker.is_open for worker in stack.gateway.fleet.workers)


async def held(stack: Stack) -> tuple[Any, ScriptedWorker, ScriptedWorker]:
    """A request of which nothing comes, and the servers that have it; what comes to any server after it goes by the book."""
    stack.script(silence, silence)
    call = stack.call()
    await call.read()
    prefill, decode = await serving(stack, "prefill"), await serving(stack, "decode")
    stack.script(by_the_book, by_the_book)
    return call, prefill, decode


async def test_a_transfer_that_failed_speaks_against_the_pair_alone(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of)
    call, prefill, decode = await held(stack)
    decode.fail(decode.starts[0].room, grpc.StatusCode.DATA_LOSS, "digest_differs", origin=common_pb2.ORIGIN_TRANSFER)
    report = (await rest(call))[-1].report
    assert (report.prefill_instance, report.decode_instance) != (prefill.instance_id, decode.instance_id)
    assert not any(worker.breaker._num_failures for worker in stack.gateway.fleet.workers)


async def test_a_server_that_is_cut_off_from_the_gateway_speaks_against_itself(stack_of: StackOf) -> None:
    """Though it is the other server that says so: that one may be in the next pair."""
    stack = await two_by_two(stack_of)
    call, prefill, decode = await held(stack)
    prefill.fail(prefill.starts[0].room, UNAVAILABLE, "gateway_lost", origin=common_pb2.ORIGIN_GATEWAY)
    report = (await rest(call))[-1].report
    assert report.decode_instance != decode.instance_id
    assert report.failed_attempts[0].failure.cause == "decode_lost"
    assert len(decode.starts) == 1


async def test_a_server_that_keeps_failing_is_left_alone_and_found_again(stack_of: StackOf) -> None:
    stack = await two_by_two(stack_of)
    bad = stack.of("decode", 0)
    bad.script = failing(UNAVAILABLE)
    replies = [await stack.reply() for _ in range(30)]
    assert {reply.text for reply in replies} == {ANSWER}
    assert THRESHOLD <= len(bad.starts) < THRESHOLD + 3  # the threshold, and a probe where this took longer than a pause
    assert any("decode-0" in text and "failed one after the other" in text for text in stack.gateway.fleet.problems())
    bad.script = by_the_book
    async with asyncio.timeout(20):
        while (await stack.reply()).last.report.decode_instance != "decode-0":
            pass
    assert not any("decode-0" in text for text in stack.gateway.fleet.problems())
    await stack.settled()


async def test_breakers_never_leave_a_request_without_a_server(stack_of: StackOf) -> None:
    """That every server has failed is no reason to refuse what one of them may do now."""
    stack: Stack = await stack_of()
    stack.script(None, failing(UNAVAILABLE))
    for _ in range(THRESHOLD + 1):
        await failure_of(stack.call())
    assert [worker.leg.value for worker in stack.gateway.fleet.workers if worker.breaker.is_open] == ["decode"]  # not the leg that did not fail
    stack.script()
    assert (await stack.reply()).text == ANSWER
    assert not any(worker.breaker.is_open for worker in stack.gateway.fleet.workers)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_frozen_server_is_routed_around(stack_of: StackOf, victim: str) -> None:
    """What waits there is moved once it has been silent for long enough; what comes later is not sent there; thawed, it is used again."""
    stack = await two_by_two(stack_of, silence_limit_s=0.6)
    frozen = stack.of(victim, 0)
    frozen.freeze()
    began = time.monotonic()
    replies = await asyncio.gather(*(stack.reply() for _ in range(8)))
    assert time.monotonic() - began < 4
    assert {reply.text for reply in replies} == {ANSWER}
    causes = [one.failure.cause for reply in replies for one in reply.last.report.failed_attempts]
    assert causes
    assert set(causes) == {f"{victim}_silent"}
    assert any(frozen.instance_id in text and "no sign of life" in text for text in stack.gateway.fleet.problems())
    for _ in range(6):
        report = (await stack.reply()).last.report
        assert not report.failed_attempts
        assert frozen.instance_id not in (report.prefill_instance, report.decode_instance)
    frozen.thaw()
    await eventually(lambda: not any(worker.silent for worker in stack.gateway.fleet.workers))
    seen = [(await stack.reply()).last.report for _ in range(8)]
    assert any(frozen.instance_id in (report.prefill_instance, report.decode_instance) for report in seen)
    await stack.settled()


async def test_an_idle_fleet_is_not_silent(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(silence_limit_s=0.5)
    await asyncio.sleep(1.5)
    assert not any(worker.silent or worker.counters["silences"] for worker in stack.gateway.fleet.workers)


async def test_with_no_other_server_a_silent_one_is_waited_for(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(silence_limit_s=0.3)
    stack.decode.freeze()
    await eventually(lambda: any(worker.silent for worker in stack.gateway.fleet.workers))
    assert stack.gateway.fleet.ready
    answer = asyncio.create_task(stack.reply())
    await asyncio.sleep(0.8)
    assert not answer.done()
    stack.decode.thaw()
    assert (await answer).text == ANSWER


async def test_a_drain_waits_for_a_request_between_two_rooms(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.attempts.backoff_s", lambda _: 0.5)
    stack = await two_by_two(stack_of, max_rooms=1, max_queue=0)
    stack.of("decode", 0).script = stack.of("decode", 1).script = failing(UNAVAILABLE)
    call = stack.call()
    await call.read()
    await eventually(lambda: num_starts(stack, "decode") == 1 and not stack.gateway.rooms._rooms)
    stack.script()
    with pytest.raises(grpc.aio.AioRpcError, match="--max-rooms"):  # its place is kept
        await stack.reply()
    await stack.gateway.drain(5.0)
    assert "".join(message.text for message in await rest(call)) == ANSWER


async def test_a_client_that_leaves_between_two_rooms_gets_no_other(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.attempts.backoff_s", lambda _: 0.3)
    stack = await two_by_two(stack_of)
    stack.script(silence, failing(UNAVAILABLE))
    call = stack.call()
    await call.read()
    await eventually(lambda: num_starts(stack, "decode") == 1 and not stack.gateway.rooms._rooms)
    call.cancel()
    await asyncio.sleep(0.6)
    assert num_starts(stack, "decode") == 1
    await stack.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http_too(stack_of: StackOf, stream: bool) -> None:
    stack = await two_by_two(stack_of)
    stack.of("decode", 0).script = failing(UNAVAILABLE)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        for _ in range(4):
            response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "stream": stream})
            assert response.status_code == 200
            assert "error" not in response.text
    assert sum(stack.gateway.rooms.retries.values()) >= 1


async def test_a_request_whose_way_broke_waits_for_the_new_one(stack_of: StackOf) -> None:
    """Of the only pair: both servers are well, and for a moment there is no route through them."""
    stack: Stack = await stack_of(prefill=1, decode=1)
    prefill, decode = stack.of("prefill", 0), stack.of("decode", 0)

    async def breaks(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        worker.say_peers(problem="the way from prefill broke")
        worker.fail(start.room, UNAVAILABLE, "way_lost", origin=common_pb2.ORIGIN_TRANSFER)

    prefill.script, decode.script = silence, breaks
    call = stack.call()
    await call.read()
    await eventually(lambda: bool(decode.starts) and not stack.gateway.fleet.ready)
    servers = stack.gateway.fleet.counts()
    assert [(servers[kind]["connected"], servers[kind]["usable"]) for kind in ("prefill", "decode")] == [(1, 0), (1, 0)]
    prefill.script = decode.script = by_the_book
    decode.say_peers()
    messages = await rest(call)
    assert messages[-1].report.failed_attempts[0].failure.cause == "way_lost"
    assert "".join(message.text for message in messages) == ANSWER
    await stack.settled()


async def test_a_request_whose_way_broke_does_not_wait_for_a_server_that_is_gone(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(prefill=1, decode=1)
    prefill, decode = stack.of("prefill", 0), stack.of("decode", 0)
    prefill.script = decode.script = silence
    call = stack.call()
    await call.read()
    await eventually(lambda: bool(decode.starts))
    decode.say_peers(problem="the way from prefill broke")
    await eventually(lambda: not stack.gateway.fleet.ready)
    await prefill.kill()
    code, failure = await failure_of(call)
    assert (code, failure.cause) == (UNAVAILABLE, "prefill_lost")
    await stack.settled()
