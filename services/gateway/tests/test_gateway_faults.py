"""What breaks on the way, and what the client is told: every fault is made on purpose by a scripted worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_harness import Stack, ask, eventually, failure_of, greedy, rest, says
from gateway_states import advance, open_at
from gateway_worker import LENGTH, STOP, TRANSFER, ScriptedWorker, silence

from baton.gateway.room import State
from baton.wire.v1 import common_pb2, inference_pb2_grpc, worker_pb2

StackOf = Callable[..., Any]

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


STATES = [State.BOOTSTRAPPING, State.WAITING, State.TRANSFERRING, State.SUCCESS]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_killed_worker_ends_the_room_at_once_and_the_other_leg(split: Stack, victim: str, state: State) -> None:
    """Its rooms fail UNAVAILABLE with stage and origin; the other leg is aborted with that same author; a late kill of prefill harms nobody."""
    call, room = await open_at(split, state)
    other = split.decode if victim == "prefill" else split.prefill
    began = time.monotonic()
    await split.of(victim).kill()
    if victim == "prefill" and state is State.SUCCESS:
        split.decode.event(room, finished=worker_pb2.Finished(reason=LENGTH, completion_tokens=2))
        messages = await rest(call)
        assert messages[-1].finish_reason == LENGTH
        return
    code, failure = await failure_of(call)
    assert time.monotonic() - began < 2
    assert code is UNAVAILABLE
    assert failure.cause == f"{victim}_lost"
    assert failure.origin == (common_pb2.ORIGIN_PREFILL if victim == "prefill" else common_pb2.ORIGIN_DECODE)
    assert failure.stage == state
    assert f"{victim}-0" in failure.message
    if state is not State.SUCCESS:  # then prefill's leg is over
        await other.wait(lambda: bool(other.aborts))
        assert (other.aborts[0].room, other.aborts[0].failure.cause, other.aborts[0].failure.origin) == (room, failure.cause, failure.origin)
    await split.settled()


@pytest.mark.parametrize(("cut", "witness"), [("decode", "prefill"), ("prefill", "decode")])
async def test_a_gateway_that_lives_is_not_lost_to_its_own_client(split: Stack, cut: str, witness: str) -> None:
    """A server that is cut off from the gateway ends its half, and the other one passes its word on: it is that server that is lost."""
    call, room = await open_at(split, State.WAITING)
    split.of(witness).fail(room, UNAVAILABLE, "gateway_lost", "the session of gateway g ended", origin=common_pb2.ORIGIN_GATEWAY)
    code, failure = await failure_of(call)
    origin = common_pb2.ORIGIN_PREFILL if cut == "prefill" else common_pb2.ORIGIN_DECODE
    assert (code, failure.cause, failure.origin, failure.stage) == (UNAVAILABLE, f"{cut}_lost", origin, State.WAITING)
    assert all(words in failure.message for words in (f"{cut}-0", f"{witness}-0", "the session of gateway g ended"))
    assert not split.of(witness).aborts
    await split.settled()


async def test_prefill_lost_after_the_hand_over_harms_nobody(split: Stack) -> None:
    """Decode has the KV cache and the client the first token; that prefill never said `transferred` does not matter any more."""
    call, room = await open_at(split, State.TRANSFERRING)
    split.decode.event(room, kv_ready=worker_pb2.KvReady())
    await eventually(lambda: split.gateway.rooms._rooms[room].machine.state is State.SUCCESS)
    await split.prefill.kill()
    await split.ready(ready=False)
    split.decode.tokens(room, 1, [101])
    split.decode.event(room, finished=worker_pb2.Finished(reason=LENGTH, completion_tokens=2))
    messages = await rest(call)
    assert [token for message in messages for token in message.token_ids] == [100, 101]
    await split.settled()


async def test_prefill_lost_before_its_token_came_fails_the_room(split: Stack) -> None:
    call, room = await open_at(split, State.WAITING)
    split.decode.event(room, kv_ready=worker_pb2.KvReady())
    await eventually(lambda: split.gateway.rooms._rooms[room].machine.state is State.SUCCESS)
    await split.prefill.kill()
    code, failure = await failure_of(call)
    assert (code, failure.cause) == (UNAVAILABLE, "prefill_lost")
    await split.settled()


async def test_tokens_of_a_report_count_before_its_events(split: Stack) -> None:
    """One engine step may end a room that it also gave a token."""
    call, room = await open_at(split, State.SUCCESS)
    finished = worker_pb2.RoomEvent(room=room, finished=worker_pb2.Finished(reason=LENGTH, completion_tokens=4))
    split.decode.report(worker_pb2.Report(events=[finished], rooms=[room, room], indexes=[2, 3], tokens=[102, 103]))
    messages = await rest(call)
    assert messages[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_that_comes_back_on_its_port_is_used_again(split: Stack, victim: str) -> None:
    old = split.of(victim)
    await old.kill()
    await split.ready(ready=False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await split.reply()
    assert caught.value.code() is UNAVAILABLE
    assert f"{victim}-0" in (caught.value.details() or "")
    new = await old.successor().start()
    split.workers[split.workers.index(old)] = new
    await split.ready()
    reply = await split.reply()
    assert reply.text == "the answer is forty two"
    assert new.instance_id in (reply.last.report.prefill_instance, reply.last.report.decode_instance)
    # the worker that stayed is told the identity of the new one with each room
    assert split.decode.starts[-1].decode.prefill_instance_id == split.prefill.instance_id
    await split.settled()


async def test_a_prefill_server_that_returns_elsewhere_is_told_to_decode(split: Stack) -> None:
    old = split.prefill
    await old.kill()
    new = old.successor()
    new.Describe = _elsewhere(new)  # type: ignore[method-assign]
    await new.start()
    split.workers[split.workers.index(old)] = new
    await split.decode.wait(lambda: split.decode.peers[-1:] == [["10.0.0.9:8998"]])


def _elsewhere(worker: ScriptedWorker) -> Any:
    describe = worker.Describe

    async def moved(request: Any, context: Any) -> worker_pb2.WorkerInfo:
        info = await describe(request, context)
        info.bootstrap_address = "10.0.0.9:8998"
        return info

    return moved


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
async def test_a_client_that_leaves_ends_both_legs(split: Stack, state: State) -> None:
    call, room = await open_at(split, state)
    call.cancel()
    await split.decode.wait(lambda: bool(split.decode.aborts))
    abort = split.decode.aborts[0]
    assert (abort.room, abort.failure.origin, abort.failure.cause) == (room, common_pb2.ORIGIN_CLIENT, "client_gone")
    if state is not State.SUCCESS:
        await split.prefill.wait(lambda: bool(split.prefill.aborts))
        assert split.prefill.aborts[0].failure.origin == common_pb2.ORIGIN_CLIENT
    await split.settled()
    assert split.gateway.rooms.outcomes == {("client", state.name, "client_gone"): 1}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
async def test_a_leg_that_fails_gives_its_own_words_and_ends_the_other(split: Stack, state: State) -> None:
    call, room = await open_at(split, state)
    split.decode.fail(room, grpc.StatusCode.RESOURCE_EXHAUSTED, "kv_pool_full", "no pages left", origin=common_pb2.ORIGIN_DECODE)
    code, failure = await failure_of(call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (failure.cause, failure.message, failure.stage, failure.origin) == ("kv_pool_full", "no pages left", state, common_pb2.ORIGIN_DECODE)
    assert failure.elapsed_ms >= 0
    if state is not State.SUCCESS:
        await split.prefill.wait(lambda: bool(split.prefill.aborts))
    assert split.decode.aborts == []  # it ended that leg itself
    await split.settled()


async def test_the_stage_of_a_failure_is_the_rooms_own(split: Stack) -> None:
    """Decode may not know yet that the transfer began."""
    call, room = await open_at(split, State.TRANSFERRING)
    lost = common_pb2.Failure(code=14, origin=common_pb2.ORIGIN_PREFILL, stage=common_pb2.ROOM_STATE_WAITING, cause="prefill_lost", message="gone")
    split.decode.event(room, failed=lost)
    _, failure = await failure_of(call)
    assert failure.stage == State.TRANSFERRING


async def test_a_worker_that_does_not_say_who_failed_is_charged_itself(split: Stack) -> None:
    call, room = await open_at(split, State.WAITING)
    split.prefill.fail(room, UNAVAILABLE, "odd")
    _, failure = await failure_of(call)
    assert (failure.origin, failure.stage) == (common_pb2.ORIGIN_PREFILL, State.WAITING)


@pytest.mark.parametrize(
    ("state", "cause", "setting"),
    [
        (State.BOOTSTRAPPING, "bootstrap_timeout", "bootstrap_timeout_s"),
        (State.WAITING, "waiting_timeout", "waiting_timeout_s"),
        (State.TRANSFERRING, "transfer_timeout", "transfer_timeout_s"),
    ],
)
async def test_every_state_has_a_limit_of_its_own(stack_of: StackOf, state: State, cause: str, setting: str) -> None:
    stack: Stack = await stack_of(**{setting: 0.3})
    call, _ = await open_at(stack, state)
    code, failure = await failure_of(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (failure.cause, failure.origin, failure.stage, failure.allowed_ms) == (cause, common_pb2.ORIGIN_GATEWAY, state, 300)
    assert failure.elapsed_ms >= 300
    assert f"--{setting.replace('_', '-')}" in failure.message
    await stack.decode.wait(lambda: bool(stack.decode.aborts))
    await stack.prefill.wait(lambda: bool(stack.prefill.aborts))
    await stack.settled()


async def test_a_request_has_one_deadline_in_every_state(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(request_timeout_s=0.4)
    for state in STATES:
        number = len(stack.prefill.starts)
        stack.script(silence, silence)
        call = stack.call()
        await call.read()
        start = await stack.prefill.next_start(number + 1)
        await stack.decode.next_start(number + 1)
        advance(stack, start.room, state)
        code, failure = await failure_of(call)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (failure.cause, failure.allowed_ms, failure.stage) == ("deadline", 400, state)
        assert 0 < start.deadline_ms <= 401
    await stack.settled()


async def test_events_out_of_order_and_twice_change_nothing(split: Stack) -> None:
    """Decode's whole part arrives before prefill's, each event twice, tokens backwards; the answer and the states are those of every day."""
    split.script(silence, silence)
    answer = says(split.tokenizer, "out of order")
    call = split.call()
    await call.read()
    room = (await split.prefill.next_start()).room
    await split.decode.next_start()
    for _ in range(2):
        split.decode.event(room, kv_ready=worker_pb2.KvReady(digest_checked=True))
        split.decode.event(room, reserved=worker_pb2.Reserved(pages=1))
    for index in reversed(range(1, len(answer))):
        split.decode.tokens(room, index, answer[index : index + 1])
        split.decode.tokens(room, index, answer[index : index + 1])
    split.decode.event(room, finished=worker_pb2.Finished(reason=STOP, completion_tokens=len(answer)))
    split.decode.event(room, finished=worker_pb2.Finished(reason=STOP, completion_tokens=len(answer)))
    await asyncio.sleep(0.05)
    for _ in range(2):
        split.prefill.event(room, transfer_started=worker_pb2.TransferStarted())
        split.prefill.event(room, bootstrapped=worker_pb2.Bootstrapped())
    split.prefill.tokens(room, 0, answer[:1])
    split.prefill.tokens(room, 0, answer[:1])
    split.prefill.event(room, transferred=worker_pb2.Transferred(transfer=TRANSFER))
    messages = await rest(call)
    assert "".join(message.text for message in messages) == "out of order"
    assert [token for message in messages for token in message.token_ids] == answer
    assert [span.state for span in messages[-1].report.states] == [1, 2, 3, 4]
    assert messages[-1].report.transfer.bytes == TRANSFER.bytes
    await split.settled()


async def test_two_servers_that_disagree_on_a_token_are_found_out(split: Stack) -> None:
    call, room = await open_at(split, State.TRANSFERRING)
    split.decode.tokens(room, 0, [99])  # prefill said 100
    code, failure = await failure_of(call)
    assert code is grpc.StatusCode.INTERNAL
    assert (failure.cause, failure.origin) == ("token_conflict", common_pb2.ORIGIN_TRANSFER)
    assert "100" in failure.message
    assert "99" in failure.message
    await split.settled()


async def test_tokens_that_never_came_are_missed(split: Stack) -> None:
    call, room = await open_at(split, State.SUCCESS)
    split.decode.event(room, finished=worker_pb2.Finished(reason=LENGTH, completion_tokens=5))
    code, failure = await failure_of(call)
    assert code is grpc.StatusCode.INTERNAL
    assert failure.cause == "tokens_lost"
    assert "5 tokens, 3 of them" in failure.message
    await split.settled()


async def test_an_answer_does_not_wait_for_a_prefill_leg_that_forgets_to_end(split: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.live_room.SETTLE_S", 0.2)
    call, room = await open_at(split, State.TRANSFERRING, ask(report=False))
    split.decode.event(room, kv_ready=worker_pb2.KvReady())
    split.decode.event(room, finished=worker_pb2.Finished(reason=LENGTH, completion_tokens=1))
    messages = await rest(call)
    assert messages[-1].finish_reason == LENGTH
    await split.prefill.wait(lambda: bool(split.prefill.aborts))
    assert split.prefill.aborts[0].failure.cause == "leg_not_ended"
    await split.settled()
    assert split.gateway.rooms.outcomes == {"success": 1}


async def test_a_client_that_does_not_read_is_ended_within_a_bound(stack_of: StackOf) -> None:
    """The client's window is a few kilobytes, so that the gateway's writes stop; the answer goes on until the bound is reached."""
    stack: Stack = await stack_of(
        answer=lambda start: [100] * 20_000,
        max_buffered_tokens=64,
        worker={role: {"max_model_len": 100_000, "total_pages": 10_000} for role in ("prefill", "decode")},
    )
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(stack.grpc_address, options=window) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(ask(sampling=greedy(max_tokens=20_000)), timeout=60)
        await call.read()  # and nothing more
        await stack.decode.wait(lambda: bool(stack.decode.aborts), timeout_s=30)
        assert stack.decode.aborts[0].failure.cause == "slow_reader"
        assert stack.decode.aborts[0].failure.origin == common_pb2.ORIGIN_CLIENT
        code, failure = await failure_of(call)
        assert (code, failure.cause) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "slow_reader")
    await stack.settled()


async def test_a_report_that_cannot_be_read_ends_the_session_not_the_gateway(split: Stack) -> None:
    call, _ = await open_at(split, State.WAITING)
    split.prefill.report(worker_pb2.Report(rooms=[1], indexes=[1, 2], tokens=[1]))
    code, failure = await failure_of(call)
    assert (code, failure.cause) == (UNAVAILABLE, "prefill_lost")
    assert "1 rooms, 2 indexes and 1 tokens" in failure.message
    split.script()
    await split.ready()
    assert (await split.reply()).text == "the answer is forty two"


async def test_too_many_rooms_are_refused_as_overload(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(max_rooms=1, max_queue=0)
    call, _ = await open_at(stack, State.WAITING)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-rooms" in (caught.value.details() or "")
    assert len(stack.prefill.starts) == 1
    call.cancel()
    await stack.settled()
    stack.script()
    assert (await stack.reply()).text


async def test_a_drain_lets_streams_end_and_then_ends_them(stack_of: StackOf) -> None:
    stack: Stack = await stack_of()
    call, room = await open_at(stack, State.SUCCESS)
    draining = asyncio.create_task(stack.gateway.drain(5.0))
    await eventually(lambda: stack.gateway.rooms.draining)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply()
    assert caught.value.code() is UNAVAILABLE
    assert "stopping" in (caught.value.details() or "")
    stack.decode.event(room, finished=worker_pb2.Finished(reason=LENGTH, completion_tokens=2))
    assert (await rest(call))[-1].finish_reason == LENGTH
    await draining

    other: Stack = await stack_of()
    call, room = await open_at(other, State.SUCCESS)
    draining = asyncio.create_task(other.gateway.drain(0.2))
    code, failure = await failure_of(call)
    assert (code, failure.cause, failure.origin) == (UNAVAILABLE, "gateway_stopped", common_pb2.ORIGIN_GATEWAY)
    assert failure.stage != common_pb2.ROOM_STATE_UNSPECIFIED
    assert failure.elapsed_ms > 0
    await draining
    await other.decode.wait(lambda: bool(other.decode.aborts))
    assert other.decode.aborts[0].failure.origin == common_pb2.ORIGIN_GATEWAY


async def test_an_abort_overtakes_a_start_that_was_not_sent(split: Stack) -> None:
    worker = next(worker for worker in split.gateway.fleet.workers if worker.leg.value == "prefill")

    class Sink:
        def on_tokens(self, *_: Any) -> None: ...

        def on_event(self, *_: Any) -> None: ...

        def on_lost(self, *_: Any) -> None: ...

        def on_silent(self, *_: Any) -> None: ...

    worker.start(worker_pb2.Start(room=5, prompt_token_ids=[1, 2]), Sink())
    worker.abort(5, common_pb2.Failure(cause="client_gone"))
    await split.reply()
    assert [start.room for start in split.prefill.starts if start.room == 5] == []
    assert split.prefill.aborts == []
    await split.settled()
