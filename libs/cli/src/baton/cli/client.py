"""A conversation over gRPC: one streamed answer of `Inference.Chat`."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import grpc.aio

from baton.cli.errors import CallError, UsageError
from baton.cli.reaching import Reach, call_error, channel_to
from baton.servicekit import TlsSettings
from baton.wire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

FINISH_NAMES = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length", common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls"}


@dataclass
class Answer:
    """One answer as the client saw it; `ttft_ms` from the call to the first text, by the client's clock."""

    text: str = ""
    finish: str = ""
    ttft_ms: float | None = None
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)
    report: inference_pb2.RoomReport | None = None


@dataclass(frozen=True)
class ChatOptions:
    """What is asked for; absent values take the server's defaults. report: whether all of the room's report is shown, which always comes."""

    model: str
    temperature: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None
    report: bool = False

    def with_model(self, model: str) -> "ChatOptions":
        return replace(self, model=model)

    def request(self, messages: Sequence[tuple[str, str]]) -> inference_pb2.ChatRequest:
        sampling = inference_pb2.SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed)
        turns = [inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
        return inference_pb2.ChatRequest(model=self.model, messages=turns, sampling=sampling, report=True)


class GatewayClient:
    """Calls to one gateway. Raises CallError with the status and the gateway's own words."""

    def __init__(self, channel: grpc.aio.Channel, address: str, found: Reach) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._address = address
        self._metadata = found.metadata

    async def model_or_only(self, name: str | None) -> str:
        """`name`, or the one model that the gateway serves. Raises UsageError when there are several to choose from."""
        if name is not None:
            return name
        try:
            served = [model.id for model in (await self._stub.ListModels(inference_pb2.ListModelsRequest(), metadata=self._metadata)).models]
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        if len(served) != 1:
            raise UsageError(f"the gateway at {self._address} serves {len(served)} models ({', '.join(served) or 'none'}); choose one with --model")
        return served[0]

    async def chat(self, options: ChatOptions, messages: Sequence[tuple[str, str]], on_text: Callable[[str], None]) -> Answer:
        """Streams one answer into `on_text`. Cancelling this coroutine cancels the call."""
        answer, started_s = Answer(), time.perf_counter()
        try:
            async for part in self._stub.Chat(options.request(messages), metadata=self._metadata):
                if part.text:
                    answer.ttft_ms = answer.ttft_ms or 1000 * (time.perf_counter() - started_s)
                    answer.text += part.text
                    on_text(part.text)
                if part.finish_reason:
                    answer.finish = FINISH_NAMES.get(part.finish_reason, str(part.finish_reason))
                if part.HasField("usage"):
                    answer.usage = part.usage
                if part.HasField("report"):
                    answer.report = part.report
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        return answer

    def _explain(self, error: grpc.aio.AioRpcError) -> CallError:
        return call_error(self._address, error)


@asynccontextmanager
async def connect(address: str, reach: Reach | None = None) -> AsyncIterator[GatewayClient]:
    """A channel to a gateway's gRPC address: plain text unless `reach` names a CA file. Raises UsageError for files that cannot be used."""
    found = reach or Reach(TlsSettings())
    async with channel_to(address, found) as channel:
        yield GatewayClient(channel, address, found)
