"""A worker's front around an engine that answers by script, behind the real port of SGLang's contract, and a client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import grpc.aio
import pytest
from opentelemetry.trace import NoOpTracer
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as pb_grpc

from baton.engine.grammar import Grammars
from baton.engine.types import (
    EngineEvent,
    EngineStats,
    Failed,
    Failure,
    Finished,
    FinishReason,
    KVReady,
    Request,
    Reserved,
    Role,
    Token,
    Transferred,
    TransferStats,
)
from baton.servicekit import ListenSettings, TlsSettings
from baton.sglangcompat import Claims, Door, Peering
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import common_pb2
from baton.workerkit import Description, EngineHost, Limits, SglangSettings, WorkerFront

EOS = 2
FIRST_TOKEN = 100


class ScriptedEngine:
    """Room after room: tokens 100, 101, ..., until max_tokens; while `hold` is set, nothing. In role prefill and decode it is one half of it."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.requests: dict[int, Request] = {}
        self.aborted: list[tuple[int, Failure]] = []
        self.events: list[EngineEvent] = []
        self.hold = False

    def add(self, request: Request) -> None:
        self.requests[request.room] = request

    def give_up(self, room: int, failure: Failure) -> None: ...

    def abort(self, room: int, failure: Failure) -> None:
        self.aborted.append((room, failure))
        if self.requests.pop(room, None) is not None:
            self.events.append(Failed(room, failure))

    def on_milestones(self, tell: Callable[[list[EngineEvent]], None]) -> None: ...

    def on_wait(self, is_woken: Callable[[], bool]) -> None: ...

    def step(self) -> list[EngineEvent]:
        events, self.events = self.events, []
        if not self.hold:
            for room, request in self.requests.items():
                events += self._answer(room, request)
            self.requests.clear()
        return events

    def _answer(self, room: int, request: Request) -> list[EngineEvent]:
        most = request.sampling.max_tokens
        if self.role is Role.PREFILL:
            stats = TransferStats(transport="none", num_bytes=0, num_puts=0, duration_s=0.0, exposed_s=0.0, digest=False)
            return [Token(room, 0, FIRST_TOKEN), Transferred(room, stats)]
        split = self.role is Role.DECODE
        said: list[EngineEvent] = [Reserved(room, 1, 16), KVReady(room, False, 0.0, FIRST_TOKEN)] if split else []
        said += [Token(room, index, FIRST_TOKEN + index) for index in range(int(split), most)]
        is_stop = FIRST_TOKEN + most - 1 in request.sampling.stop_token_ids
        return [*said, Finished(room, FinishReason.STOP if is_stop else FinishReason.LENGTH, most)]

    def has_work(self) -> bool:
        return bool(self.events) or (bool(self.requests) and not self.hold)

    def stats(self) -> EngineStats:
        return EngineStats(32, 32 - len(self.requests), rooms=len(self.requests), running=len(self.requests))


class Publications:
    """The exporter's side of a claim."""

    def __init__(self) -> None:
        self.publishers: dict[int, str] = {}
        self.refused: list[tuple[int, str]] = []
        self.tell: Callable[[int, str], None] = lambda room, decode: None

    def publisher(self, room: int) -> str:
        return self.publishers.get(room, "")

    def on_unclaimed(self, tell: Callable[[int, str], None]) -> None:
        self.tell = tell

    def refuse(self, room: int, failure: Failure) -> None:
        self.refused.append((room, failure.cause))


class Bench:
    """One served worker. `stub` is a client of its SGLang port."""

    def __init__(self, role: Role, folder: Path, timeout_s: float = 30.0) -> None:
        self.engine = ScriptedEngine(role)
        self.host = EngineHost(self.engine)
        self.named: list[frozenset[str]] = []
        self.publications = Publications()
        mark = common_pb2.KVFingerprint(protocol_version=1, model="tiny", page_size=16, dtype="float32")
        self.front = WorkerFront(
            self.host, Limits(role, 1000, 256, 32, 16), Description("worker-1", "tiny", "1.0", mark), grammars=Grammars(folder, 1000), max_rooms=4,
            tracer=NoOpTracer(), on_refused=self.publications.refuse, on_peers=self.named.append,
        )  # fmt: skip
        claims = Claims(self.publications, timeout_s=timeout_s, capacity=2)
        leg = {Role.PREFILL: claims, Role.DECODE: Peering(self.front, timeout_s=timeout_s), Role.PLAIN: None}[role]
        self.claims = claims
        self.door = Door(
            self.front, leg, model_path=folder, listen=ListenSettings(), settings=SglangSettings(port=0, timeout_s=timeout_s),
            tls=TlsSettings(), stall_limit_s=30.0, obstacle=lambda: self.obstacle,
        )  # fmt: skip
        self.obstacle = ""

    async def __aenter__(self) -> Self:
        self.front.start()
        self.channel = grpc.aio.insecure_channel(await self.door.open(), options=CHANNEL_OPTIONS)
        self.stub: Any = pb_grpc.SglangSchedulerStub(self.channel)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.channel.close()
        await self.door.close()
        await self.front.close()

    async def ask(self, request: Any) -> list[Any]:
        return [message async for message in self.stub.Generate(request)]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": EOS, "architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def served(model_folder: Path) -> Callable[..., Bench]:
    return lambda role, **more: Bench(role, model_folder, **more)


@pytest.fixture
def request_type() -> Callable[..., Any]:
    """A request as smg sends it."""

    def make(request_id: str = "chatcmpl-1", *, prompt: int = 5, pairing: dict[str, Any] | None = None, stream: bool = False, **sampling: Any) -> Any:
        filled = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "max_new_tokens": 4, "n": 1} | sampling
        given = {name: value for name, value in filled.items() if value is not None}
        request = pb.GenerateRequest(
            request_id=request_id, tokenized=pb.TokenizedInput(input_ids=range(prompt)), sampling_params=pb.SamplingParams(**given), stream=stream
        )
        if pairing is not None:
            request.disaggregated_params.CopyFrom(pb.DisaggregatedParams(**pairing))
        return request

    return make


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Any]:
    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 # what is waited for is in another thread
                await asyncio.sleep(0.01)

    return wait
