"""The edges of HTTP over real sockets: lengths that are announced, bytes that are no HTTP, and clients that close their own direction."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from gateway_harness import MODEL, Stack, eventually
from gateway_worker import silence
from test_gateway_limits import POST, Raw

COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0}
ANSWER = "the answer"


def request(**changes: Any) -> bytes:
    content = json.dumps(COMPLETION | changes).encode()
    return POST + b"content-length: %d\r\n\r\n" % len(content) + content


async def answer_of(raw: Raw) -> tuple[bytes, Any]:
    """Head and body of one answer that says its length; the connection need not end with it."""
    head = await asyncio.wait_for(raw.reader.readuntil(b"\r\n\r\n"), 20)
    length = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))
    return head, json.loads(await asyncio.wait_for(raw.reader.readexactly(length), 20))


# --- lengths -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"expect: 100-continue\r\n"])
async def test_a_length_above_the_limit_is_refused_without_its_body(stack_of: Callable[..., Any], more: bytes) -> None:
    stack: Stack = await stack_of(max_body_bytes=65_536)
    raw = await Raw.open(stack)
    raw.send(POST + more + b"content-length: 99999999999999\r\n\r\n{")
    head, content = await answer_of(raw)  # within seconds, of the minute that a body has
    assert head.startswith(b"HTTP/1.1 413 "), "and nobody was asked to go on"
    assert b"connection: close" in head
    assert content["error"]["code"] == "body_too_large"
    assert "99999999999999 bytes or more, the limit is 65536" in content["error"]["message"]
    assert await raw.rest() == b"", "the connection is closed"


async def test_a_client_that_is_still_sending_gets_to_read_the_refusal(stack_of: Callable[..., Any]) -> None:
    stack: Stack = await stack_of(max_body_bytes=65_536)
    raw = await Raw.open(stack)
    raw.send(POST + b"content-length: 20000000\r\n\r\n")
    for _ in range(20_000_000 // 100_000):
        raw.send(b"x" * 100_000)
    await asyncio.wait_for(raw.writer.drain(), 30)
    head, content = await answer_of(raw)
    assert (head.split()[1], content["error"]["code"]) == (b"413", "body_too_large")


# --- no HTTP -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_an_openai_error(split: Stack, data: bytes) -> None:
    raw = await Raw.open(split)
    raw.send(data)
    head, content = await answer_of(raw)
    assert (head.split()[1], content["error"]["code"], content["error"]["type"]) == (b"400", "malformed_http", "invalid_request_error")
    assert content["error"]["message"].startswith("this is not HTTP/1.1: ")
    assert await raw.rest() == b""
    assert split.gateway.http.limits.counters == {"malformed_http": 1}


async def test_nothing_is_written_into_an_answer_under_way(split: Stack) -> None:
    split.script(None, silence)
    raw = await Raw.open(split)
    raw.send(request(stream=True))
    await raw.reader.readuntil(b"\r\n\r\n")
    raw.send(b"\x00\x01\r\n\r\n")
    assert b"malformed_http" not in await raw.rest()
    await split.settled()


# --- clients that close their direction --------------------------------------------------------------------------------------------


def after_interim(data: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer behind an interim one, if there is any."""
    _, _, behind = data.rpartition(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, content = behind.partition(b"\r\n\r\n")
    return head, content


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_sent_its_request_may_close_its_direction(split: Stack, stream: bool) -> None:
    go_on = asyncio.Event()
    normal = split.decode.script

    async def later(worker: Any, start: Any) -> None:
        await go_on.wait()
        await normal(worker, start)

    split.script(None, later)
    raw = await Raw.open(split)
    raw.send(request(stream=stream))
    raw.writer.write_eof()
    await split.decode.next_start()
    await asyncio.sleep(0.2)  # looked after more than once
    assert len(split.gateway.rooms) == 1
    go_on.set()
    head, content = after_interim(await raw.rest())
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert (b"data: [DONE]" in content) if stream else json.loads(content)["choices"][0]["text"]
    await split.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_has_gone_is_noticed_all_the_same(split: Stack, stream: bool) -> None:
    """To the gateway it closes its direction, too. Nothing is written to it but what says nothing: its host's reset tells."""
    split.script(silence, silence)
    raw = await Raw.open(split)
    raw.send(request(stream=stream))
    room = (await split.prefill.next_start()).room
    await split.decode.next_start()
    if stream:
        split.prefill.tokens(room, 0, [100])
        await raw.reader.readuntil(b"\r\n\r\n")
    raw.writer.close()
    await split.decode.wait(lambda: bool(split.decode.aborts))
    assert split.decode.aborts[0].failure.cause == "client_gone"
    await split.settled()
    await eventually(lambda: not split.gateway.http._server.server_state.connections)  # type: ignore[union-attr]


async def test_a_direction_that_is_closed_within_a_stream_ends_it_no_sooner(split: Stack) -> None:
    go_on = asyncio.Event()

    async def later(worker: Any, start: Any) -> None:
        await go_on.wait()
        await normal(worker, start)

    normal = split.decode.script
    split.script(None, later)
    raw = await Raw.open(split)
    raw.send(request(stream=True))
    head = await raw.reader.readuntil(b"\r\n\r\n")
    raw.writer.write_eof()
    said = await asyncio.wait_for(raw.reader.readuntil(b"3\r\n:\n\n\r\n"), 20)  # a chunk, a comment of the events
    go_on.set()
    events = head + said + await raw.rest()
    assert events.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await split.settled()


async def test_requests_in_a_row_are_answered_before_the_connection_ends(split: Stack) -> None:
    raw = await Raw.open(split)
    raw.send(request() + request(max_tokens=1) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    raw.writer.write_eof()
    data = await raw.rest()
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert data.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("sent", [POST + b"content-length: 100\r\n\r\n{", POST, request().replace(b"HTTP/1.1", b"HTTP/1.0")])
async def test_whoever_closes_before_its_request_is_whole_has_left(split: Stack, sent: bytes) -> None:
    split.script(silence, silence)
    raw = await Raw.open(split)
    raw.send(sent)
    raw.writer.write_eof()
    assert await raw.rest() == b""
    await split.settled()
