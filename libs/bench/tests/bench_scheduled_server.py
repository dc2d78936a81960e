"""A gRPC and an HTTP server that answer by a schedule and write down when they did, on the clock of the generator beside them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from baton.wire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

LONG_CHARS = 1000


@dataclass
class Schedule:
    """Delay before each token. While a long prompt is in its first delay, no other stream gets a token: a server without a split."""

    first_s: float = 0.06
    gap_s: float = 0.03
    long_first_s: float = 0.3
    num_tokens: int = 6
    prefill: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Of each answer: (when the request arrived, when each token was handed to the socket).
    log: list[tuple[float, list[float]]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    num_cancelled: int = 0

    async def tokens(self, prompt: str) -> AsyncIterator[str]:
        arrived_s, sent_s = time.perf_counter(), list[float]()
        self.log.append((arrived_s, sent_s))
        self.prompts.append(prompt)
        try:
            for number in range(self.num_tokens):
                if number == 0 and len(prompt) > LONG_CHARS:
                    async with self.prefill:
                        await asyncio.sleep(self.long_first_s)
                else:
                    await asyncio.sleep(self.gap_s if number else self.first_s)
                    async with self.prefill:
                        pass
                sent_s.append(time.perf_counter())
                yield " word"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise


class GrpcServer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    async def Generate(self, request, context):  # noqa: N802
        if request.text.startswith("Refuse"):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        yield inference_pb2.GenerateResponse(request_id="x")
        async for message in self._answer(request.text):
            yield message

    async def Chat(self, request, context):  # noqa: N802
        async for message in self._answer(request.messages[-1].content):
            yield message

    async def _answer(self, prompt: str):
        async for text in self.schedule.tokens(prompt):
            yield inference_pb2.GenerateResponse(text=text, token_ids=[1])
        usage = inference_pb2.Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=self.schedule.num_tokens)
        moved = inference_pb2.TransferReport(bytes=4096, puts=3, duration_ms=2.0, exposed_ms=0.5)
        report = inference_pb2.RoomReport(transfer=moved, ttft_ms=60.0)
        yield inference_pb2.GenerateResponse(finish_reason=common_pb2.FINISH_REASON_LENGTH, usage=usage, report=report)


@asynccontextmanager
async def grpc_server(schedule: Schedule) -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(GrpcServer(schedule), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        await server.stop(None)


class HttpServer:
    """Just enough of HTTP/1.1: one request a connection, a chunked answer."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.bodies: list[dict[str, object]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            await self._answer(head, body, writer)
        finally:
            writer.close()

    async def _answer(self, head: str, body: dict, writer: asyncio.StreamWriter) -> None:
        is_chat = "/chat/" in head.split("\r\n")[0]
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        if prompt.startswith("Refuse"):
            writer.write(b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 4\r\n\r\nfull")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if is_chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        async for text in self.schedule.tokens(prompt):
            self._event(writer, {"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
            await writer.drain()
        if prompt.startswith("Cut"):
            writer.write(b"0\r\n\r\n")
            return
        self._event(writer, {"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
        self._event(
            writer,
            {
                "choices": [],
                "usage": {"prompt_tokens": 5, "completion_tokens": self.schedule.num_tokens, "prompt_tokens_details": {"cached_tokens": 2}},
            },
        )
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, body: dict) -> None:
        self._chunk(writer, b"data: " + json.dumps(body).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@asynccontextmanager
async def http_server(server: HttpServer) -> AsyncIterator[str]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    finally:
        listening.close()
