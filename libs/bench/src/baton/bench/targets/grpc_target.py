"""Baton's `baton.v1.Inference` over gRPC."""

from __future__ import annotations  # InferenceAsyncStub is in the stubs' types only

from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc.aio

from baton.bench.errors import RequestFailedError
from baton.bench.request import Request
from baton.bench.targets.base import Asking, Call, Piece
from baton.bench.targets.tls import ClientTls
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

FINISH_NAMES = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length", common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls"}
Api = Literal["completions", "chat"]
AnyRequest = inference_pb2.GenerateRequest | inference_pb2.ChatRequest


class GrpcTarget:
    """`completions` is `Generate`, `chat` is `Chat`."""

    def __init__(self, address: str, api: Api, asking: Asking, api_key: str | None = None, tls: ClientTls | None = None) -> None:
        self.name = f"grpc://{address} ({api})"
        self._channel = _channel(address, tls or ClientTls())
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._api, self._asking = api, asking

    async def aclose(self) -> None:
        await self._channel.close()

    def prepare(self, request: Request) -> Call:
        asking = self._asking
        sampling = inference_pb2.SamplingParams(temperature=asking.temperature, max_tokens=request.max_tokens, ignore_eos=asking.ignore_eos)
        if self._api == "completions":
            generate = inference_pb2.GenerateRequest(model=asking.model, text=request.prompt, sampling=sampling, report=True)
            return _GrpcCall(self._stub, generate, self._metadata)
        turns = [inference_pb2.ChatMessage(role=message.role, content=message.content) for message in request.messages]
        chat = inference_pb2.ChatRequest(model=asking.model, messages=turns, sampling=sampling, report=True)
        return _GrpcCall(self._stub, chat, self._metadata)


def _channel(address: str, tls: ClientTls) -> grpc.aio.Channel:
    credentials = tls.credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


class _GrpcCall:
    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, request: AnyRequest, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub, self._request, self._metadata = stub, request, metadata

    async def stream(self) -> AsyncIterator[Piece]:
        request, metadata = self._request, self._metadata
        call: grpc.aio.UnaryStreamCall[Any, inference_pb2.GenerateResponse]
        if isinstance(request, inference_pb2.GenerateRequest):
            call = self._stub.Generate(request, metadata=metadata)
        else:
            call = self._stub.Chat(request, metadata=metadata)
        try:
            async for message in call:
                yield _piece(message)
        except grpc.aio.AioRpcError as error:
            raise RequestFailedError(error.code().name.lower(), error.details() or "") from error
        finally:
            call.cancel()  # of a call that has ended this does nothing


def _piece(message: inference_pb2.GenerateResponse) -> Piece:
    usage = message.usage if message.HasField("usage") else None
    return Piece(
        text=message.text,
        num_tokens=len(message.token_ids),
        finish=FINISH_NAMES.get(message.finish_reason, ""),
        prompt_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
        server=(_server_numbers(message.report) if message.HasField("report") else {}) | ({"cached_tokens": usage.cached_tokens} if usage else {}),
    )


def _server_numbers(report: inference_pb2.RoomReport) -> dict[str, float]:
    numbers = {"server_ttft_ms": report.ttft_ms} | _state_times(report)
    if report.prefill_started_ms > 0:
        numbers["prefill_started_ms"] = report.prefill_started_ms
    if report.HasField("transfer"):
        moved = report.transfer
        numbers |= {"kv_bytes": moved.bytes, "kv_puts": moved.puts, "transfer_ms": moved.duration_ms, "transfer_exposed_ms": moved.exposed_ms}
        if moved.busy_ms > 0:
            numbers["transfer_busy_ms"] = moved.busy_ms
    return numbers


def _state_times(report: inference_pb2.RoomReport) -> dict[str, float]:
    """Time in each state, in the order in which a room passes through them: a request's queue times."""
    times: dict[str, float] = {}
    for span in report.states:
        name = f"state_{common_pb2.RoomState.Name(span.state).removeprefix('ROOM_STATE_').lower()}_ms"
        times[name] = times.get(name, 0.0) + span.duration_ms
    return times
