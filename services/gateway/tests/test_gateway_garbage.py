"""A request that has ended is gone: a cycle of it would stay until Python looks for such, for which every stream waits.

One that failed leaves its error's traceback."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import pytest
from gateway_bodies import CHAT
from gateway_harness import MODEL, Stack, ask, eventually, greedy
from gateway_worker import ScriptedWorker, by_the_book, silence

from baton.wire.v1 import worker_pb2

StackOf = Callable[..., Any]


@contextmanager
def no_garbage() -> Iterator[None]:
    """Of the gateway's."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        ours = [type(found).__qualname__ for found in gc.garbage if type(found).__module__.startswith("baton.gateway")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not ours


async def answered(stack: Stack) -> None:
    assert (await stack.reply()).text


async def several(stack: Stack) -> None:
    sampling = greedy()
    sampling.n = 2
    assert (await stack.reply(ask(sampling=sampling))).text


async def over_http(stack: Stack) -> None:
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{stack.http}/v1/completions", json={"model": MODEL, "prompt": "one two", "max_tokens": 4, "temperature": 0})
    assert reply.status_code == 200


async def streamed_chat(stack: Stack) -> None:
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{stack.http}/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    assert reply.text.endswith("data: [DONE]\n\n")


async def stopped(stack: Stack) -> None:
    """By a string, so that the gateway ends the legs."""
    sampling = greedy()
    sampling.stop.append("forty")
    assert (await stack.reply(ask(sampling=sampling))).text == "the answer is "


async def left(stack: Stack) -> None:
    stack.script(prefill=silence, decode=silence)
    call = stack.call()
    await call.read()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()


async def test_a_request_that_went_on_elsewhere_leaves_no_cycle(stack_of: StackOf) -> None:
    to_break: list[str] = []

    async def breaks(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        if to_break:
            worker.fail(start.room, grpc.StatusCode.UNAVAILABLE, to_break.pop())
        else:
            await by_the_book(worker, start)

    stack = await stack_of(prefill=2, decode=2)
    await eventually(lambda: len(stack.gateway.fleet.routes) == 4)
    stack.script(prefill=breaks)
    await answered(stack)
    await stack.settled()
    with no_garbage():
        to_break.append("scripted")
        await answered(stack)
        await stack.settled()
        await asyncio.sleep(0.05)
    assert sum(stack.gateway.rooms.retries.values()) == 1


@pytest.mark.parametrize("request_of", [answered, several, over_http, streamed_chat, stopped, left])
async def test_a_request_that_has_ended_leaves_no_cycle(stack_of: StackOf, request_of: Callable[[Stack], Any]) -> None:
    stack = await stack_of(retries=0)
    await request_of(stack)
    await stack.settled()
    with no_garbage():
        for _ in range(3):
            await request_of(stack)
        await stack.settled()
        await asyncio.sleep(0.05)  # what gRPC holds of a call that was just over
