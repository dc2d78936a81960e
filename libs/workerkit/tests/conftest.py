"""An engine whose every step is scripted, and a worker's front around it, served over real gRPC."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc.aio
import pytest
from opentelemetry.trace import NoOpTracer

from baton.engine.grammar import Grammars
from baton.engine.types import EngineEvent, EngineStats, Failed, Failure, Finished, FinishReason, PrefillStarted, Request, Role, Token
from baton.servicekit import GrpcServer
from baton.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from baton.wire.v1 import common_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.workerkit import Description, EngineHost, Limits, RefusingInference, WorkerFront, WorkerServicer


class ScriptedEngine:
    """Answers every room with tokens 0, 1, 2, ... and finishes after max_tokens; can be told to hold, hang or break."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.sent: dict[int, int] = {}
        self.events: list[EngineEvent] = []
        self.aborted: list[tuple[int, Failure]] = []
        self.given_up: list[tuple[int, Failure]] = []
        self.hold = False
        self.quarantined = False
        self.break_with: Exception | None = None
        self.hang = threading.Event()
        self.hang.set()
        self.steps = 0
        self.turns = 0

    def add(self, request: Request) -> None:
        self.requests[request.room] = request
        self.sent[request.room] = 0
        self.events.append(PrefillStarted(request.room))

    def give_up(self, room: int, failure: Failure) -> None:
        self.given_up.append((room, failure))

    def abort(self, room: int, failure: Failure) -> None:
        self.aborted.append((room, failure))
        if self.requests.pop(room, None) is not None:
            self.events.append(Failed(room, failure))

    def on_milestones(self, tell: Callable[[list[EngineEvent]], None]) -> None:
        self.tell = tell

    def on_wait(self, is_woken: Callable[[], bool]) -> None:
        self.is_woken = is_woken

    def step(self) -> list[EngineEvent]:
        self.turns += 1
        self.hang.wait()
        if self.break_with is not None:
            raise self.break_with
        events, self.events = self.events, []
        if self.hold or not self.requests:
            return events
        self.steps += 1
        for room, request in list(self.requests.items()):
            events.append(Token(room, self.sent[room], self.sent[room] + 100))
            self.sent[room] += 1
            if self.sent[room] == request.sampling.max_tokens:
                events.append(Finished(room, FinishReason.LENGTH, self.sent[room]))
                del self.requests[room]
        return events

    def has_work(self) -> bool:
        return bool(self.events) or (bool(self.requests) and not self.hold)

    def stats(self) -> EngineStats:
        held = 8 if self.quarantined else len(self.requests)
        waiting = len(self.requests) if self.hold else 0
        quarantined = 8 if self.quarantined else 0
        return EngineStats(8, 8 - held, rooms=len(self.requests), waiting=waiting, quarantined_pages=quarantined, steps=self.steps)


@dataclass
class Bench:
    """A served worker and what its hooks were told."""

    engine: ScriptedEngine
    host: EngineHost
    front: WorkerFront
    server: GrpcServer
    refused: list[tuple[int, Failure]]
    peers: list[frozenset[str]]
    lost: list[BaseException]

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.server.address, options=CHANNEL_OPTIONS)


class Gateway:
    """One session, driven by a test."""

    def __init__(self, bench: Bench, gateway_id: str = "gateway-1", address: str = "gate.example:50060") -> None:
        self.channel = bench.channel()
        self.call: Any = worker_pb2_grpc.WorkerStub(self.channel).Session()
        self.attach = worker_pb2.Attach(gateway_id=gateway_id, gateway_address=address)
        self.tokens: dict[int, list[int]] = {}
        self.events: list[worker_pb2.RoomEvent] = []
        self.reports = 0
        self.load: worker_pb2.WorkerLoad | None = None
        self.draining = False

    async def __aenter__(self) -> Self:
        await self.send(attach=self.attach)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def send(self, **command: Any) -> None:
        await self.call.write(worker_pb2.Command(**command))

    async def start(self, room: int, *, prompt: list[int] | None = None, max_tokens: int = 3, **more: Any) -> None:
        start = worker_pb2.Start(
            room=room,
            prompt_token_ids=[1, 2] if prompt is None else prompt,
            sampling=worker_pb2.Sampling(top_p=1.0, max_tokens=max_tokens),
            plain=worker_pb2.PlainLeg(),
        )
        start.MergeFrom(worker_pb2.Start(**more))
        await self.send(start=start)

    async def read(self) -> worker_pb2.Report:
        report: worker_pb2.Report = await asyncio.wait_for(self.call.read(), 10)
        assert isinstance(report, worker_pb2.Report), "the stream ended"
        self.reports += 1
        self.events.extend(report.events)
        for room, index, token in zip(report.rooms, report.indexes, report.tokens, strict=True):
            assert index == len(self.tokens.setdefault(room, []))
            self.tokens[room].append(token)
        if report.HasField("load"):
            self.load = report.load
        self.draining = report.draining
        return report

    async def read_until(self, room: int, kind: str) -> worker_pb2.RoomEvent:
        while True:
            for event in self.events:
                if event.room == room and event.WhichOneof("event") == kind:
                    return event
            await self.read()


@pytest.fixture
def gateway_type() -> type[Gateway]:
    return Gateway


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def bench(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[Bench]:
    host = EngineHost(engine)
    limits = Limits(Role.PLAIN, vocab_size=1000, max_model_len=64, num_pages=8, page_size=4)
    description = Description("plain-1", "tiny", "0.0", common_pb2.KVFingerprint(model="tiny"))
    server = GrpcServer("127.0.0.1", 0, options=SERVER_OPTIONS)
    refused: list[tuple[int, Failure]] = []
    peers: list[frozenset[str]] = []
    lost: list[BaseException] = []
    front = WorkerFront(
        host,
        limits,
        description,
        grammars=Grammars(tmp_path, 1000),
        max_rooms=4,
        tracer=NoOpTracer(),
        on_refused=lambda room, failure: refused.append((room, failure)),
        on_peers=peers.append,
        on_lost=lost.append,
    )
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, WorkerServicer(front), "baton.v1.Worker")
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, RefusingInference(Role.PLAIN, front.gateway_address), "baton.v1.Inference")
    await server.start()
    await server.set_serving(True)
    front.start()
    yield Bench(engine, host, front, server, refused, peers, lost)
    engine.hang.set()
    await server.stop()
    await front.close()
    assert not host.alive


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    async def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "timed out"
            await asyncio.sleep(0.01)

    return wait
