"""What an operator can follow: one span a request, its context at the workers, the room in every line; and TLS."""

from __future__ import annotations

import io
import json
import logging
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import structlog
import trustme
from gateway_harness import MODEL, Stack, ask, eventually, greedy
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from baton.gateway.http.server import HttpServer
from baton.servicekit import LogSettings, TlsError, TlsSettings, Tracing, configure_logs, extract_traceparent

StackOf = Callable[..., Any]

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Traced:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


async def test_one_span_a_request_joins_the_callers_trace_and_goes_on_at_the_workers(stack_of: StackOf) -> None:
    traced = Traced()
    stack: Stack = await stack_of(tracing=traced.tracing)
    call = stack.stub.Generate(ask(request_id="mine"), timeout=20, metadata=(("traceparent", PARENT),))
    async for _ in call:
        pass
    await eventually(lambda: len(traced.spans()) == 1)
    span = traced.spans()[0]
    assert span.context is not None
    assert span.parent is not None
    assert format(span.context.trace_id, "032x") == TRACE
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    room = stack.prefill.starts[0].room
    assert span.attributes is not None
    assert (span.attributes["baton.room"], span.attributes["baton.request_id"]) == (str(room), "mine")
    names = [event.name for event in span.events]
    assert names[-1] == "SUCCESS"
    assert names[0] == "BOOTSTRAPPING"
    in_order = ("BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS")
    assert [name for name in in_order if name in names] == names  # two streams: a state may be stepped over
    for worker in (stack.prefill, stack.decode):
        carried = trace.get_current_span(extract_traceparent(worker.starts[0].traceparent)).get_span_context()
        assert (carried.trace_id, carried.span_id) == (span.context.trace_id, span.context.span_id)


async def test_http_headers_carry_the_trace_too_and_failures_are_marked(stack_of: StackOf) -> None:
    traced = Traced()
    stack: Stack = await stack_of(tracing=traced.tracing)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        body = {"model": MODEL, "prompt": "x"}
        assert (await client.post("/v1/completions", json=body, headers={"traceparent": PARENT})).status_code == 200
        assert (await client.post("/v1/completions", json=body | {"max_tokens": 0}, headers={"traceparent": PARENT})).status_code == 400
    await eventually(lambda: len(traced.spans()) == 2)
    good, bad = traced.spans()
    assert {format(span.context.trace_id, "032x") for span in (good, bad) if span.context} == {TRACE}
    assert good.status.status_code is StatusCode.UNSET
    assert (bad.status.status_code, bad.status.description) == (StatusCode.ERROR, "out_of_range")


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    configure_logs(LogSettings(format="json"), service="gateway", instance_id="g-1", stream=stream)  # type: ignore[arg-type]
    yield stream
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_every_line_of_a_request_has_its_room_and_its_trace(stack_of: StackOf, logged: io.StringIO) -> None:
    traced = Traced()
    stack: Stack = await stack_of(tracing=traced.tracing)
    await stack.reply(ask("nobody reads this", sampling=greedy(max_tokens=4)))
    stack.script(None, _failing)
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.reply()
    await stack.settled()
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    for start in stack.prefill.starts:
        mine = [line for line in lines if line.get("room") == start.room]
        assert len(mine) >= 2
        assert all("trace_id" in line and "request_id" in line for line in mine)
    failed = next(line for line in lines if line["event"] == "room failed")
    assert (failed["origin"], failed["cause"], failed["level"]) == ("decode", "as_scripted", "warning")
    # never one a token
    assert len([line for line in lines if line.get("room") == stack.prefill.starts[0].room]) <= 6
    assert "nobody reads this" not in logged.getvalue()


async def test_a_request_id_that_is_refused_is_in_no_log(split: Stack, logged: io.StringIO) -> None:
    """It may be as long as a body."""
    for request_id in ("nobody reads this" * 10, "nobody reads this\n"):
        with pytest.raises(grpc.aio.AioRpcError, match="request_id"):
            await split.reply(ask(request_id=request_id))
    refused = [line for line in map(json.loads, logged.getvalue().splitlines()) if line["event"] == "request refused"]
    assert [line["cause"] for line in refused] == ["out_of_range", "invalid_request"]
    assert "nobody reads this" not in logged.getvalue()


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("completions", {"prompt": {"text": "nobody reads this"}}),
        ("completions", {"prompt": "x", "model": "nobody reads this"}),
        ("chat/completions", {"messages": "nobody reads this"}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "nobody reads this"}]}]}),
        (
            "completions",
            {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nobody reads this"}}}},
        ),
    ],
)
async def test_a_request_that_is_refused_is_quoted_to_its_client_and_not_in_the_log(
    split: Stack, logged: io.StringIO, path: str, what: dict[str, Any]
) -> None:
    async with httpx.AsyncClient(base_url=split.http, timeout=20) as client:
        told = await client.post(f"/v1/{path}", json={"model": MODEL} | what)
    assert told.status_code in (400, 404)
    (line,) = [line for line in map(json.loads, logged.getvalue().splitlines()) if line["event"] == "request refused"]
    assert line["cause"] == told.json()["error"]["code"]
    assert "nobody reads this" in told.text
    assert "nobody reads this" not in logged.getvalue()


async def _failing(worker: Any, start: Any) -> None:
    worker.fail(start.room, grpc.StatusCode.UNAVAILABLE, "as_scripted")


def files(folder: Path, signer: trustme.CA, trusted: trustme.CA | None) -> TlsSettings:
    folder.mkdir()
    certificate = signer.issue_cert("localhost", "127.0.0.1")
    cert_file, key_file, ca_file = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    cert_file.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key_file.write_bytes(certificate.private_key_pem.bytes())
    if trusted is None:
        return TlsSettings(cert_file=cert_file, key_file=key_file)
    ca_file.write_bytes(trusted.cert_pem.bytes())
    return TlsSettings(cert_file=cert_file, key_file=key_file, ca_file=ca_file)


@pytest.mark.parametrize("mutual", [False, True])
async def test_https_with_the_same_certificates_as_grpc(tmp_path: Path, mutual: bool) -> None:
    authority = trustme.CA()
    tls = files(tmp_path / "ours", authority, authority if mutual else None)
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("hello"))])
    server = HttpServer(app, "127.0.0.1", 0, tls)
    await server.start()
    try:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        bare = httpx.AsyncClient(verify=context)
        if mutual:
            with pytest.raises(httpx.TransportError):
                await bare.get(f"https://{server.address}/")
            authority.issue_cert("client").configure_cert(context)
        async with httpx.AsyncClient(verify=context) as client:
            assert (await client.get(f"https://{server.address}/")).text == "hello"
        with pytest.raises(httpx.TransportError):
            await bare.get(f"http://{server.address}/")
        await bare.aclose()
    finally:
        await server.stop(1.0)


async def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("nothing")
    server = HttpServer(Starlette(), "127.0.0.1", 0, TlsSettings(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem"))
    with pytest.raises(TlsError, match="certificate"):
        await server.start()
    await server.stop(0)
