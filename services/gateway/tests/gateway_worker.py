"""A worker that follows a script: the Worker contract over real gRPC, for faults and orders of events that a real worker shows only by luck."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from baton.wire.channel import SERVER_OPTIONS
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc

ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE, "plain": common_pb2.ROLE_PLAIN}

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@dataclass
class Shared:
    """What all workers of a stack agree on: the answer to every prompt, as token ids."""

    answer: Callable[[worker_pb2.Start], Sequence[int]]
    #: Bootstrap address -> the prefill process that is there; the decode servers that see it come and go.
    prefill: dict[str, str] = field(default_factory=dict)
    decode: list[ScriptedWorker] = field(default_factory=list)

    def prefill_is(self, address: str, instance_id: str) -> None:
        """A prefill process came or (empty) went: every decode server notices by itself."""
        self.prefill[address] = instance_id
        for worker in self.decode:
            worker.say_peers()

    def tokens(self, start: worker_pb2.Start) -> list[int]:
        """The answer behind as much of it as the prompt ends with, cut as an engine would: at max_tokens, after a stop token."""
        whole, prompt = list(self.answer(start)), list(start.prompt_token_ids)
        had = next(count for count in range(min(len(whole), len(prompt)), -1, -1) if prompt[len(prompt) - count :] == whole[:count])
        taken: list[int] = []
        for token in whole[had : had + start.sampling.max_tokens]:
            taken.append(token)
            if len(taken) >= start.sampling.min_tokens and token in start.sampling.stop_token_ids:
                break
        return taken

    def reason(self, start: worker_pb2.Start) -> common_pb2.FinishReason.ValueType:
        return STOP if self.tokens(start)[-1] in start.sampling.stop_token_ids else LENGTH


def scripted_logprobs(token: int, num_top: int) -> inference_pb2.TokenLogprobs:
    """What every scripted worker says of a token: the most probable ones are it and those before it."""
    top = [token - number for number in range(num_top)]
    return inference_pb2.TokenLogprobs(logprob=-token / 1000, top_token_ids=top, top_logprobs=[-token / 1000 - number for number in range(num_top)])


def scripted_prompt_logprobs(start: worker_pb2.Start) -> list[inference_pb2.TokenLogprobs]:
    """Of all tokens of its prompt but the first; rank: the token's place."""
    asked = start.sampling.prompt_logprobs
    said = [scripted_logprobs(token, asked) for token in start.prompt_token_ids[1:]]
    for rank, one in enumerate(said, start=1):
        one.rank = rank
    return said


Script = Callable[["ScriptedWorker", worker_pb2.Start], Awaitable[None]]


async def by_the_book(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
    """What a worker of this role says when all goes well."""
    room, answer = start.room, worker.shared.tokens(start)
    if worker.role != "decode" or start.HasField("local"):
        worker.prompt_logprobs(start)
    if worker.role == "prefill":
        worker.event(room, bootstrapped=worker_pb2.Bootstrapped())
        worker.event(room, prefill_started=worker_pb2.PrefillStarted())
        worker.event(room, transfer_started=worker_pb2.TransferStarted())
        worker.tokens(room, 0, answer[:1])
        worker.event(room, transferred=worker_pb2.Transferred(transfer=TRANSFER))
        return
    if start.HasField("local") or start.HasField("fork"):
        if start.HasField("local"):
            worker.event(room, reserved=worker_pb2.Reserved(pages=1))
        worker.event(room, prefill_started=worker_pb2.PrefillStarted())
        worker.tokens(room, 0, answer[:1])
    elif worker.role == "decode":
        worker.event(room, reserved=worker_pb2.Reserved(pages=1))
        worker.event(room, kv_ready=worker_pb2.KvReady(digest_checked=True, exposed_ms=0.5))
    else:
        worker.event(room, prefill_started=worker_pb2.PrefillStarted())
        worker.tokens(room, 0, answer[:1])
    for index in range(1, len(answer)):
        worker.tokens(room, index, answer[index : index + 1])
        if index % 8 == 0:
            await asyncio.sleep(0)
    worker.event(room, finished=worker_pb2.Finished(reason=worker.shared.reason(start), completion_tokens=len(answer)))


TRANSFER = inference_pb2.TransferReport(
    transport="sysv",
    bytes=46_080,
    puts=3,
    duration_ms=1.5,
    exposed_ms=9.0,
    parts=[
        inference_pb2.TransferPart(first_layer=0, num_layers=1, start_ms=0.0, duration_ms=0.5, bytes=23_040),
        inference_pb2.TransferPart(first_layer=1, num_layers=1, start_ms=0.75, duration_ms=0.625, bytes=23_040),
    ],
)


async def silence(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
    """Takes a room and says nothing of it."""


@dataclass(eq=False)
class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """One worker process, as far as a gateway can tell. `starts`, `aborts`, `peers`: what it was told."""

    role: str
    shared: Shared
    instance_id: str
    vocab_size: int
    max_model_len: int = 512
    total_pages: int = 64
    page_size: int = 16
    sampling_level: int = 3
    takes_forks: bool = True
    fingerprint: dict[str, Any] = field(default_factory=dict)
    script: Script = by_the_book
    port: int = 0
    address: str = ""
    starts: list[worker_pb2.Start] = field(default_factory=list)
    aborts: list[worker_pb2.Abort] = field(default_factory=list)
    peers: list[list[str]] = field(default_factory=list)
    attached: list[worker_pb2.Attach] = field(default_factory=list)
    drains: int = 0

    def __post_init__(self) -> None:
        self._server: grpc.aio.Server | None = None
        self._reports: list[asyncio.Queue[worker_pb2.Report]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[int, inference_pb2.SamplingParams] = {}
        self.news = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()

    # --- life

    async def start(self) -> ScriptedWorker:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        assert self.port
        self.address = f"127.0.0.1:{self.port}"
        await self._server.start()
        if self.role == "prefill":
            self.shared.prefill_is(self.bootstrap, self.instance_id)
        elif self.role == "decode":
            self.shared.decode.append(self)
        return self

    async def kill(self) -> None:
        """Ends every stream at once, as a process that dies does."""
        for task in self._tasks:
            task.cancel()
        if self in self.shared.decode:
            self.shared.decode.remove(self)
        if self.role == "prefill" and self.shared.prefill.get(self.bootstrap) == self.instance_id:
            self.shared.prefill_is(self.bootstrap, "")
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def freeze(self) -> None:
        """As SIGSTOP does: nothing is read, nothing is said, every connection stays."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Goes on where it was."""
        self._thawed.set()

    def successor(self, **changes: Any) -> ScriptedWorker:
        """The process that an operator starts in its place: same port, another instance."""
        about = {
            "role": self.role,
            "shared": self.shared,
            "instance_id": self.instance_id + "x",
            "vocab_size": self.vocab_size,
            "port": self.port,
            "fingerprint": self.fingerprint,
            "max_model_len": self.max_model_len,
            "total_pages": self.total_pages,
            "sampling_level": self.sampling_level,
        }
        return ScriptedWorker(**(about | changes))

    @property
    def bootstrap(self) -> str:
        """Where decode would meet it; nobody listens there."""
        return f"127.0.0.1:{20_000 + self.port % 10_000}"

    # --- the contract

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.WorkerInfo:  # noqa: N802
        await self._thawed.wait()
        fingerprint = {"protocol_version": 1, "model": "tiny", "weights": "w", "dtype": "float32", "num_layers": 2, "page_size": self.page_size}
        return worker_pb2.WorkerInfo(
            instance_id=self.instance_id,
            role=ROLES[self.role],
            model="tiny",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            fingerprint=common_pb2.KVFingerprint(**(fingerprint | self.fingerprint)),
            bootstrap_address=self.bootstrap if self.role == "prefill" else "",
            load=self.load(),
            sampling_level=self.sampling_level,
            takes_forks=self.takes_forks and self.role != "prefill",
        )

    async def Session(self, request_iterator: AsyncIterator[worker_pb2.Command], context: Any) -> AsyncIterator[worker_pb2.Report]:  # noqa: N802
        reports: asyncio.Queue[worker_pb2.Report] = asyncio.Queue()
        self._reports.append(reports)
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            yield worker_pb2.Report(load=self.load())
            while True:
                report = await reports.get()
                await self._thawed.wait()
                yield report
        finally:
            reader.cancel()
            self._reports.remove(reports)

    async def _read(self, commands: AsyncIterator[worker_pb2.Command]) -> None:
        async for command in commands:
            await self._thawed.wait()
            match command.WhichOneof("command"):
                case "attach":
                    self.attached.append(command.attach)
                case "start":
                    self.starts.append(command.start)
                    self._asked.setdefault(command.start.room, command.start.sampling)
                    task = asyncio.create_task(self.script(self, command.start))  # type: ignore[arg-type]
                    self._tasks.add(task)
                    task.add_done_callback(self._ended)
                case "abort":
                    self.aborts.append(command.abort)
                case "drain":
                    self.drains += 1
                case "peers":
                    self.peers.append(list(command.peers.bootstrap_addresses))
                    if self.role == "decode":
                        self.say_peers()
            self.news.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    # --- what it says

    def load(self, **changes: Any) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(**({"total_pages": self.total_pages, "free_pages": self.total_pages} | changes))

    def report(self, report: worker_pb2.Report) -> None:
        for reports in self._reports:
            reports.put_nowait(report)

    def report_load(self, **changes: Any) -> None:
        self.report(worker_pb2.Report(load=self.load(**changes)))

    def say_peers(self, problem: str = "") -> None:
        """Decode: says of each prefill server that was named last that it is connected to whoever is there now, or that it is not."""
        states = []
        for address in self.peers[-1] if self.peers else []:
            there = "" if problem else self.shared.prefill.get(address, "")
            state = worker_pb2.PeerState(bootstrap_address=address, prefill_instance_id=there)
            if there:
                state.transport, state.gigabytes_per_s = "sysv", 4.0
            else:
                state.problem = problem or "nobody is there"
            states.append(state)
        self.report(worker_pb2.Report(peers=worker_pb2.PeerStates(peers=states)))

    def event(self, room: int, **event: Any) -> None:
        self.report(worker_pb2.Report(events=[worker_pb2.RoomEvent(room=room, **event)]))

    def tokens(self, room: int, first: int, tokens: Sequence[int]) -> None:
        indexes = range(first, first + len(tokens))
        report = worker_pb2.Report(rooms=[room] * len(tokens), indexes=indexes, tokens=tokens)
        asked = self._asked.get(room)
        if asked is not None and asked.HasField("top_logprobs"):
            for index, token in zip(indexes, tokens, strict=True):
                report.logprobs.append(worker_pb2.RoomLogprobs(room=room, index=index, logprobs=scripted_logprobs(token, asked.top_logprobs)))
        self.report(report)

    def prompt_logprobs(self, start: worker_pb2.Start) -> None:
        """If they are asked for: in two reports."""
        said = scripted_prompt_logprobs(start) if start.sampling.HasField("prompt_logprobs") else []
        for first, part in ((1, said[:1]), (2, said[1:])):
            if part:
                self.report(worker_pb2.Report(prompt_logprobs=[worker_pb2.RoomPromptLogprobs(room=start.room, first=first, logprobs=part)]))

    def fail(self, room: int, code: grpc.StatusCode, cause: str, message: str = "as scripted", **more: Any) -> None:
        self.event(room, failed=common_pb2.Failure(code=code.value[0], cause=cause, message=message, **more))

    # --- what it was told

    async def wait(self, reached: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Waits until `reached()`; looked at after each command."""
        async with asyncio.timeout(timeout_s):
            while not reached():
                self.news.clear()
                await self.news.wait()

    async def next_start(self, number: int = 1) -> worker_pb2.Start:
        await self.wait(lambda: len(self.starts) >= number)
        return self.starts[number - 1]
