"""Clients over HTTP that leave, or do not read what they are sent."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from gateway_bodies import CHAT
from gateway_harness import Stack, eventually
from gateway_worker import silence

from baton.gateway.http.server import HttpServer
from baton.wire.v1 import common_pb2, worker_pb2

StackOf = Callable[..., Any]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_first_token", [False, True])
async def test_a_client_that_leaves_ends_both_legs(split: Stack, stream: bool, after_first_token: bool) -> None:
    """Also when nothing is being sent to it: it is not the next write that finds out."""
    split.script(silence, silence)
    reader, writer = await asyncio.open_connection(*split.http.removeprefix("http://").split(":"))
    body = json.dumps(CHAT | {"stream": stream}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    room = (await split.prefill.next_start()).room
    await split.decode.next_start()
    if after_first_token:
        split.prefill.tokens(room, 0, [100])
        if stream:
            assert b"200 OK" in await reader.readline()
    writer.close()
    await split.decode.wait(lambda: bool(split.decode.aborts), timeout_s=2)
    await split.prefill.wait(lambda: bool(split.prefill.aborts), timeout_s=2)
    assert {abort.failure.origin for abort in (split.decode.aborts[0], split.prefill.aborts[0])} == {common_pb2.ORIGIN_CLIENT}
    await split.settled()


async def test_a_client_that_does_not_read_is_ended_within_a_bound(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.client_handler.LAST_WORDS_S", 0.2)
    monkeypatch.setattr("baton.gateway.http.responses.LAST_WORDS_S", 0.2)
    big = {role: {"max_model_len": 400_000, "total_pages": 40_000} for role in ("prefill", "decode")}
    stack: Stack = await stack_of(answer=lambda start: [100] * 200_000, max_buffered_tokens=2_000, worker=big)

    async def trickle(worker: Any, start: worker_pb2.Start) -> None:
        """A token a report, so that each makes an event of its own and what the sockets hold is filled."""
        worker.event(start.room, kv_ready=worker_pb2.KvReady())
        for index in range(1, 200_000):
            worker.tokens(start.room, index, [100])
            if index % 50 == 0:
                await asyncio.sleep(0.002)
            if worker.aborts:
                return

    stack.script(None, trickle)
    host, port = stack.http.removeprefix("http://").split(":")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((host, int(port)))
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 200_000}).encode()
    deaf.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await stack.decode.wait(lambda: bool(stack.decode.aborts), timeout_s=60)
    assert stack.decode.aborts[0].failure.cause == "slow_reader"
    await stack.settled()
    # its handler lets go, though the client never reads
    await eventually(lambda: not any("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks()), 5.0)
    deaf.close()


async def test_a_complete_answer_that_nobody_reads_is_let_go_at_the_deadline(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.client_handler.LAST_WORDS_S", 0.2)
    monkeypatch.setattr("baton.gateway.http.responses.LAST_WORDS_S", 0.2)
    bind = HttpServer._bind

    def bind_small(server: HttpServer) -> socket.socket:
        listening = bind(server)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what is accepted inherits it
        return listening

    monkeypatch.setattr(HttpServer, "_bind", bind_small)
    big = {role: {"max_model_len": 400_000, "total_pages": 40_000} for role in ("prefill", "decode")}
    stack: Stack = await stack_of(request_timeout_s=4.0, max_buffered_tokens=100_000, worker=big)

    async def all_of_it(worker: Any, start: worker_pb2.Start) -> None:
        worker.event(start.room, kv_ready=worker_pb2.KvReady())
        for index in range(1, 3_000):  # a token a report: an event of its own
            worker.tokens(start.room, index, [100])
            if index % 100 == 0:
                await asyncio.sleep(0)
        worker.event(start.room, finished=worker_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=3_000))

    stack.script(None, all_of_it)
    host, port = stack.http.removeprefix("http://").split(":")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((host, int(port)))
    body = json.dumps(CHAT | {"stream": True, "request_id": "r" * 128, "max_tokens": 3_000}).encode()
    deaf.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def handled() -> bool:
        return any("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks())

    await stack.decode.next_start()
    await eventually(lambda: len(stack.gateway.rooms) == 0, 4.0)
    assert handled(), "the client read it after all"
    await eventually(lambda: not handled(), 6.0)
    assert not stack.decode.aborts, "the room had ended well"
    deaf.close()
