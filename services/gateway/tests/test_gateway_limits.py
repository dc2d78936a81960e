"""What one client may take of a gateway, over real sockets: heads, bodies, connections, time, answers that nobody reads; and its deadline."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, greedy
from gateway_worker import silence

from baton.gateway.http.server import HttpServer
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import inference_pb2, inference_pb2_grpc

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0}
HEADER = "x-request-timeout-ms"


class Raw:
    """A TCP connection to the HTTP port, and what came of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, stack: Stack) -> Raw:
        return cls(*await asyncio.open_connection("127.0.0.1", stack.gateway.http.port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def rest(self) -> bytes:
        """All that comes until the other side closes."""
        try:
            return await asyncio.wait_for(self.reader.read(), 20)
        except ConnectionResetError:
            return b""

    async def refusal(self) -> tuple[int, str]:
        head, _, body = (await self.rest()).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)["error"]["code"]


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


async def test_a_connection_that_says_nothing_is_closed(stack_of) -> None:
    stack: Stack = await stack_of(http_head_timeout_s=0.2)
    assert await (await Raw.open(stack)).rest() == b""
    assert stack.gateway.http.limits.counters == {"connection_unused": 1}


@pytest.mark.parametrize("first", [True, False])
async def test_headers_that_trickle_are_ended(stack_of, first: bool) -> None:
    """Slowloris: also on a connection that was good before."""
    stack: Stack = await stack_of(http_head_timeout_s=0.3)
    raw = await Raw.open(stack)
    if not first:
        raw.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await raw.reader.readuntil(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200")
    raw.send(POST)
    raw.send(b"x-more: 1\r\n")
    assert await raw.refusal() == (408, "head_late")


async def test_a_slow_answer_is_not_taken_for_a_slow_client(stack_of) -> None:
    stack: Stack = await stack_of(http_head_timeout_s=0.2, http_body_timeout_s=0.2, unread_timeout_s=0.2)

    async def slow(worker: Any, start: Any) -> None:
        await asyncio.sleep(0.7)
        await normal(worker, start)

    normal = stack.prefill.script
    stack.script(slow, None)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        for stream in (False, True):
            assert (await client.post("/v1/completions", json=BODY | {"stream": stream})).status_code == 200
    assert (await stack.reply()).text
    assert stack.gateway.http.limits.counters == {}


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
async def test_headers_that_are_too_large_are_refused_before_they_are_all_there(stack_of, end: bytes) -> None:
    stack: Stack = await stack_of(http_max_head_bytes=2048)
    raw = await Raw.open(stack)
    raw.send(POST + b"x-large: " + b"a" * 4000 + end)
    assert await raw.refusal() == (431, "head_too_large")
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        assert (await client.get("/health?" + "a" * 4000)).status_code == 431
        assert (await client.post("/v1/completions", json=BODY | {"prompt": "a" * 400}, headers={"x-fine": "a" * 1500})).status_code == 200
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.stub.Generate(ask(), metadata=(("x-large", "a" * 4000),), timeout=20).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_body_that_trickles_is_ended(stack_of) -> None:
    stack: Stack = await stack_of(http_body_timeout_s=0.3)
    raw = await Raw.open(stack)
    raw.send(POST + b"content-length: 100\r\n\r\n{")
    assert await raw.refusal() == (408, "body_late")
    assert not stack.prefill.starts


async def test_one_connection_too_many_is_told_so(stack_of) -> None:
    stack: Stack = await stack_of(http_max_connections=2)
    held = [await Raw.open(stack) for _ in range(2)]
    for raw in held:
        raw.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await raw.reader.readuntil(b"ok")
    text = await (await Raw.open(stack)).rest()
    assert text.startswith(b"HTTP/1.1 503 Service Unavailable")
    assert b"retry-after: 1" in text
    assert b"--http-max-connections" in text
    held[0].writer.close()
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        await eventually(lambda: len(stack.gateway.http._server.server_state.connections) < 2)
        assert (await client.get("/health")).status_code == 200


async def test_grpc_connections_are_bounded_too(stack_of) -> None:
    stack: Stack = await stack_of(grpc_max_connections=2, wait_ready=True)
    await stack.reply()
    others = [grpc.aio.insecure_channel(stack.grpc_address, options=CHANNEL_OPTIONS) for _ in range(3)]
    answers = [inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=2) for channel in others]
    ends = await asyncio.gather(*answers, return_exceptions=True)
    assert sum(isinstance(end, inference_pb2.ListModelsResponse) for end in ends) == 1
    for channel in others:
        await channel.close()


# --- answers that nobody reads -----------------------------------------------------------------------------------------------------


BIG = {role: {"max_model_len": 100_000, "total_pages": 10_000} for role in ("prefill", "decode")}


def ended_for_reading_nothing(stack: Stack) -> bool:
    return any("slow_reader" in key for key in stack.gateway.rooms.outcomes if isinstance(key, tuple))


async def test_an_http_client_that_reads_nothing_is_ended(stack_of, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = HttpServer._bind

    def bind_small(server: HttpServer) -> socket.socket:
        listening = bind(server)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what is accepted inherits it
        return listening

    monkeypatch.setattr(HttpServer, "_bind", bind_small)
    stack: Stack = await stack_of(unread_timeout_s=0.5, max_buffered_tokens=100_000, answer=lambda start: [100] * 20_000, worker=BIG)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", stack.gateway.http.port))
    body = json.dumps(BODY | {"max_tokens": 20_000, "stream": True}).encode()
    deaf.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
    await eventually(lambda: ended_for_reading_nothing(stack), 30.0)
    await stack.settled()
    await eventually(lambda: not stack.gateway.http._server.server_state.connections, 30.0)
    deaf.close()


async def test_a_grpc_client_that_reads_nothing_is_ended(stack_of) -> None:
    """Its window is a few kilobytes, so that the gateway's writes stop; no bound on tokens is reached."""
    stack: Stack = await stack_of(unread_timeout_s=0.5, max_buffered_tokens=100_000, answer=lambda start: [100] * 20_000, worker=BIG)
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(stack.grpc_address, options=window) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(ask(sampling=greedy(max_tokens=20_000)), timeout=60)
        await call.read()  # and nothing more
        await eventually(lambda: ended_for_reading_nothing(stack), 30.0)
    await stack.settled()


# --- deadlines ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "10s", "", "1e3", "99999999999", "+5", "٣"])
async def test_a_deadline_that_is_none_is_refused_by_name(split: Stack, value: str) -> None:
    async with httpx.AsyncClient(base_url=split.http, timeout=20) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=[(HEADER.encode(), value.encode())])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "X-Request-Timeout-Ms", "out_of_range")
    assert "one whole number of milliseconds in [1, 9999999999]" in error["message"]
    assert not split.prefill.starts


async def test_a_deadline_is_given_once(split: Stack) -> None:
    async with httpx.AsyncClient(base_url=split.http, timeout=20) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=[(HEADER, "5"), (HEADER, "6")])
    assert answer.status_code == 400
    assert "send it once" in answer.json()["error"]["message"]


@pytest.mark.parametrize("front", ["http", "grpc"])
async def test_one_deadline_goes_through_both_legs_and_ends_them(split: Stack, front: str) -> None:
    split.script(silence, silence)
    began = time.monotonic()
    if front == "http":
        async with httpx.AsyncClient(base_url=split.http, timeout=20) as client:
            answer = await client.post("/v1/completions", json=BODY, headers={HEADER: "700"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["stage"], error["allowed_ms"]) == (504, "deadline", "BOOTSTRAPPING", 700)
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await split.reply(timeout=0.7)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began >= 0.6
    for worker in (split.prefill, split.decode):
        assert 1 <= worker.starts[0].deadline_ms <= 710  # gRPC rounds what is left up, to as many digits as it likes to send
        await eventually(lambda worker=worker: len(worker.aborts) == 1)
    await split.settled()
