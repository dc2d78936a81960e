"""A real gateway on real ports in this process, in front of scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_worker import ROLES, Script, ScriptedWorker, Shared, by_the_book

from baton.gateway.app import Gateway, running
from baton.gateway.config import GatewaySettings
from baton.gateway.model_folder import read_model_folder
from baton.gateway.tokenizer import PromptTokenizer
from baton.servicekit import ListenSettings, Tracing, configure_metrics
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.status import failure_from_error
from baton.wire.v1 import common_pb2, fleet_pb2, inference_pb2, inference_pb2_grpc, worker_pb2

MODEL = "tiny"
#: Settings of a gateway that knows no server.
EMPTY = {"prefill": 0, "decode": 0, "registration": True, "wait_ready": False}

SamplingParams = inference_pb2.SamplingParams


def greedy(**more: Any) -> inference_pb2.SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 32} | more))


def ask(text: str = "hello", **more: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**({"model": MODEL, "text": text, "sampling": greedy(), "report": True} | more))


@dataclass
class Reply:
    """A whole answer over gRPC."""

    messages: list[inference_pb2.GenerateResponse]

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.messages)

    @property
    def ids(self) -> list[int]:
        return [token for message in self.messages for token in message.token_ids]

    @property
    def last(self) -> inference_pb2.GenerateResponse:
        return self.messages[-1]

    @property
    def states(self) -> list[str]:
        return [common_pb2.RoomState.Name(span.state).removeprefix("ROOM_STATE_") for span in self.last.report.states]


class Stack:
    """A gateway, its workers, and clients of it."""

    def __init__(self, gateway: Gateway, addresses: dict[str, str], workers: Sequence[ScriptedWorker], tokenizer: PromptTokenizer) -> None:
        self.gateway = gateway
        self.addresses = addresses
        self.http = f"http://{addresses['http']}"
        self.grpc_address = addresses["grpc"]
        self.workers = list(workers)
        self.tokenizer = tokenizer
        #: The API key that `call` shows; empty: none.
        self.key = ""
        self.channel = grpc.aio.insecure_channel(self.grpc_address, options=CHANNEL_OPTIONS)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    def of(self, role: str, number: int = 0) -> ScriptedWorker:
        return [worker for worker in self.workers if worker.role == role][number]

    @property
    def prefill(self) -> ScriptedWorker:
        return self.of("prefill")

    @property
    def decode(self) -> ScriptedWorker:
        return self.of("decode")

    def call(self, request: inference_pb2.GenerateRequest | None = None, timeout: float = 20.0) -> Any:
        metadata = (("authorization", f"Bearer {self.key}"),) if self.key else ()
        return self.stub.Generate(request or ask(), timeout=timeout, metadata=metadata)

    async def reply(self, request: inference_pb2.GenerateRequest | None = None, timeout: float = 20.0) -> Reply:
        return Reply([message async for message in self.call(request, timeout)])

    async def chat(self, *contents: str, **more: Any) -> Reply:
        messages = [inference_pb2.ChatMessage(role="user", content=content) for content in contents]
        request = inference_pb2.ChatRequest(**({"model": MODEL, "messages": messages, "sampling": greedy()} | more))
        return Reply([message async for message in self.stub.Chat(request, timeout=20.0)])

    def script(self, prefill: Script | None = None, decode: Script | None = None) -> None:
        for worker in self.workers:
            worker.script = (prefill if worker.role == "prefill" else decode) or by_the_book

    async def ready(self, *, ready: bool = True, timeout_s: float = 10.0) -> None:
        await eventually(lambda: self.gateway.fleet.ready is ready, timeout_s)

    async def settled(self) -> None:
        """No room is open, no worker holds one, no load is left."""
        await eventually(lambda: len(self.gateway.rooms) == 0)
        for worker in self.gateway.fleet.workers:
            assert worker.num_rooms == 0
            assert worker._outstanding_tokens == 0


def member(worker: ScriptedWorker, **changes: Any) -> fleet_pb2.Member:
    """What a worker says of itself where it makes itself known."""
    about = {"instance_id": worker.instance_id, "role": ROLES[worker.role], "address": worker.address, "model": MODEL, "version": "1"}
    return fleet_pb2.Member(**(about | changes))


async def rest(call: Any) -> list[inference_pb2.GenerateResponse]:
    """What is left of a call that was read from."""
    messages = []
    while isinstance(message := await call.read(), inference_pb2.GenerateResponse):
        messages.append(message)
    return messages


async def failure_of(call: Any) -> tuple[grpc.StatusCode, common_pb2.Failure]:
    """How a call that must fail failed."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value.code(), failure_from_error(caught.value, origin=common_pb2.ORIGIN_UNSPECIFIED, cause="none")


async def serving(stack: Stack, role: str) -> ScriptedWorker:
    """The one of that role that got the only room so far."""
    servers = [worker for worker in stack.workers if worker.role == role]
    await eventually(lambda: any(worker.starts for worker in servers))
    return next(worker for worker in servers if worker.starts)


async def eventually(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 # what is waited for has no event
            await asyncio.sleep(0.005)


def says(tokenizer: PromptTokenizer, text: str, *, eos: bool = True) -> list[int]:
    """The ids of an answer."""
    ids = list(tokenizer._tokenizer.encode(text, add_special_tokens=False).ids)
    return [*ids, 2] if eos else ids


_DIALECT = {"calls": "tool_call_format", "reasoning": "reasoning_format"}


@contextlib.asynccontextmanager
async def start_stack(
    folder: Path,
    *,
    prefill: int | None = None,
    decode: int | None = None,
    plain: int = 0,
    answer: str | Callable[[worker_pb2.Start], Sequence[int]] = "the answer is forty two",
    wait_ready: bool = True,
    worker: dict[str, dict[str, Any]] | None = None,
    tracing: Tracing | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """`worker`: changes to a role's workers. `answer`: what they all say."""
    tokenizer = PromptTokenizer(read_model_folder(folder), **{name: settings[key] for name, key in _DIALECT.items() if key in settings})
    spoken = says(tokenizer, answer) if isinstance(answer, str) else []
    shared = Shared(answer if callable(answer) else lambda _: spoken)
    pairs = 0 if plain else 1
    counts = {"prefill": pairs if prefill is None else prefill, "decode": pairs if decode is None else decode, "plain": plain}
    workers = []
    for role, count in counts.items():
        for number in range(count):
            about = {"vocab_size": tokenizer.vocab_size} | (worker or {}).get(role, {})
            workers.append(await ScriptedWorker(role, shared, f"{role}-{number}", **about).start())
    named: dict[str, Any] = {role: tuple(w.address for w in workers if w.role == role) for role in counts}
    whole = GatewaySettings(**({"listen": ListenSettings(port=0), "http_port": 0, "model_path": folder, "model_name": MODEL} | named | settings))
    failures: list[BaseException] = []
    try:
        metrics = configure_metrics(whole.metrics, service="gateway", instance_id="gateway-test")
        async with running(whole, tokenizer, tracing or Tracing(None), "gateway-test", failures.append, metrics) as (gateway, addresses):
            stack = Stack(gateway, addresses, workers, tokenizer)
            if wait_ready:
                await stack.ready()
            yield stack
            await stack.channel.close()
        assert not failures
        await asyncio.to_thread(metrics.shutdown)
    finally:
        for one in stack.workers if "stack" in locals() else workers:
            await one.kill()
