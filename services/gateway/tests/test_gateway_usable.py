"""Which servers a gateway uses: those that fit, are connected, are what was named, and have room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, rest
from gateway_states import open_at
from gateway_worker import LENGTH, by_the_book, silence
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.gateway.room import State
from baton.wire.v1 import worker_pb2

StackOf = Callable[..., Any]

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def test_a_pair_that_does_not_fit_is_refused_with_both_values(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(worker={"decode": {"page_size": 32}, "prefill": {"fingerprint": {"dtype": "bfloat16"}}}, wait_ready=False)
    await eventually(lambda: all(worker.connected for worker in stack.gateway.fleet.workers))
    assert not stack.gateway.fleet.ready
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply()
    assert caught.value.code() is UNAVAILABLE
    for part in ("page_size: 16 at prefill-0, 32 at decode-0", "dtype: 'bfloat16' at prefill-0, 'float32' at decode-0"):
        assert part in (caught.value.details() or "")
    assert stack.decode.peers[-1] == []  # it is not sent there either


async def test_a_pair_is_used_once_decode_says_that_it_is_connected(stack_of: StackOf) -> None:
    """The first request pays for no first contact, and a path that decode refuses gets no requests."""
    stack: Stack = await stack_of()
    stack.decode.say_peers("probe found tcp, rc was expected")
    await stack.ready(ready=False)
    assert any("prefill-0" in text and "decode-0" in text and "rc was expected" in text for text in stack.gateway.fleet.problems())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply()
    assert caught.value.code() is UNAVAILABLE
    assert "rc was expected" in (caught.value.details() or "")
    stack.decode.shared.prefill_is(stack.prefill.bootstrap, "prefill-of-yesterday")
    await eventually(lambda: any("still connected to prefill-of-yesterday" in text for text in stack.gateway.fleet.problems()))
    assert not stack.gateway.fleet.ready
    stack.decode.shared.prefill_is(stack.prefill.bootstrap, stack.prefill.instance_id)
    await stack.ready()
    assert (await stack.reply()).text == "the answer is forty two"


async def test_of_two_pairs_only_the_one_that_fits_is_used(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(prefill=2, wait_ready=False)
    odd = stack.of("prefill", 1)
    await odd.kill()
    stack.workers.append(await odd.successor(fingerprint={"weights": "others"}).start())
    await eventually(lambda: len(stack.gateway.fleet.routes) == 1 and all(worker.connected for worker in stack.gateway.fleet.workers))
    for _ in range(4):
        assert (await stack.reply()).last.report.prefill_instance == "prefill-0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 7}, "vocabulary of 7 tokens"),
        ({"role": "plain"}, "is a plain server: name it with --plain"),
        ({"max_model_len": 1}, "has a context of 1 tokens and KV pages of 16: nothing fits there"),
        ({"page_size": 0}, "and KV pages of 0: nothing fits there"),
    ],
)
async def test_a_server_that_is_not_what_was_named(split: Stack, change: dict[str, Any], words: str) -> None:
    await split.decode.kill()
    await split.ready(ready=False)
    impostor = await split.decode.successor(**change).start()
    try:
        await eventually(lambda: any(words in text for text in split.gateway.fleet.problems()))
        assert not split.gateway.fleet.ready
    finally:
        await impostor.kill()


async def test_a_draining_or_stalled_worker_gets_nothing_new(split: Stack) -> None:
    health = health_pb2_grpc.HealthStub(split.channel)

    async def serving() -> bool:
        answer = await health.Check(health_pb2.HealthCheckRequest())  # type: ignore[misc]
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    assert await serving()
    call, room = await open_at(split, State.SUCCESS)
    split.prefill.report(worker_pb2.Report(draining=True))
    await split.ready(ready=False)
    await eventually(split.gateway._changes.empty)
    assert not await serving()
    assert any("draining" in text for text in split.gateway.fleet.problems())
    # what runs goes on
    split.decode.event(room, finished=worker_pb2.Finished(reason=LENGTH, completion_tokens=2))
    assert (await rest(call))[-1].finish_reason == LENGTH
    split.prefill.report(worker_pb2.Report(draining=False))
    await split.ready()
    split.decode.report(worker_pb2.Report(load=split.decode.load(stalled_s=31.0)))
    await split.ready(ready=False)
    assert any("no progress for 31.0 s" in text for text in split.gateway.fleet.problems())


async def test_load_decides_the_route_and_comes_back(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(prefill=1, decode=2, worker={})
    await eventually(lambda: len(stack.gateway.fleet.routes) == 2)
    stack.script(silence, silence)
    busy = stack.call(ask("x" * 300))
    await busy.read()
    await eventually(lambda: bool(stack.prefill.starts and (stack.of("decode", 0).starts or stack.of("decode", 1).starts)))
    stack.script(by_the_book, by_the_book)
    taken = next(number for number in (0, 1) if stack.of("decode", number).starts)
    for _ in range(3):
        assert (await stack.reply()).last.report.decode_instance == f"decode-{1 - taken}"
    busy.cancel()
    await stack.settled()
    seen = {(await stack.reply()).last.report.decode_instance for _ in range(4)}
    assert seen == {"decode-0", "decode-1"}


async def test_round_robin_takes_turns(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(plain=3, routing="round-robin")
    await eventually(lambda: len(stack.gateway.fleet.routes) == 3)
    seen = [(await stack.reply()).last.report.decode_instance for _ in range(6)]
    assert seen[:3] == seen[3:]
    assert len(set(seen[:3])) == 3


async def test_the_model_name_is_what_the_operator_says(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(model_name="my/model")
    assert (await stack.reply(ask(model="my/model"))).text
    with pytest.raises(grpc.aio.AioRpcError, match="not served"):
        await stack.reply(ask(model=MODEL))
