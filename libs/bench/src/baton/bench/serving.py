"""One request through a gateway, timed by the client's clock."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc.aio

from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True)
class RequestTiming:
    """`ttft_ms`: from the call to the first token; `second_ms`: from there to the second; `itl_ms`: mean time between tokens. Both None
    with one token."""

    ttft_ms: float
    second_ms: float | None
    itl_ms: float | None
    total_ms: float
    token_ids: tuple[int, ...]
    report: inference_pb2.RoomReport


class ServingClient:
    """Greedy requests of exact lengths to one gateway. Use on one event loop; `aclose` when done."""

    def __init__(self, address: str, model: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._model = model

    async def aclose(self) -> None:
        await self._channel.close()

    async def tokens(self, prompt_ids: Sequence[int], num_tokens: int) -> AsyncIterator[int]:
        """Up to `num_tokens` greedy tokens as they come, past any end-of-sequence token. Raises grpc.aio.AioRpcError."""
        async for part in self._stub.Generate(self._request(prompt_ids, num_tokens)):
            for token in part.token_ids:
                yield token

    async def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> RequestTiming:
        """Exactly `num_tokens` greedy tokens, past any end-of-sequence token. Raises grpc.aio.AioRpcError, ValueError for a short answer."""
        request = self._request(prompt_ids, num_tokens)
        started_s = time.perf_counter()
        first_s = second_s = last_s = None
        ids: list[int] = []
        report = inference_pb2.RoomReport()
        async for part in self._stub.Generate(request):
            if part.token_ids:
                last_s = time.perf_counter()
                first_s = first_s or last_s
                ids.extend(part.token_ids)
                second_s = second_s or (last_s if len(ids) > 1 else None)
            if part.HasField("report"):
                report = part.report
        ended_s = time.perf_counter()
        if first_s is None or last_s is None or len(ids) != num_tokens:
            raise ValueError(f"asked for {num_tokens} tokens, received {len(ids)}")
        itl_ms = 1000 * (last_s - first_s) / (num_tokens - 1) if num_tokens > 1 else None
        second_ms = None if second_s is None else 1000 * (second_s - first_s)
        return RequestTiming(1000 * (first_s - started_s), second_ms, itl_ms, 1000 * (ended_s - started_s), tuple(ids), report)

    def _request(self, prompt_ids: Sequence[int], num_tokens: int) -> inference_pb2.GenerateRequest:
        sampling = inference_pb2.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return inference_pb2.GenerateRequest(model=self._model, token_ids=inference_pb2.TokenIds(ids=prompt_ids), sampling=sampling, report=True)
