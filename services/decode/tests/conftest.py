"""Real baton-prefill and baton-decode processes with a tiny random Llama over real UCX, and a small gateway that drives both legs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import grpc.aio
import pytest

from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import common_pb2, worker_pb2, worker_pb2_grpc

sys.path.insert(0, str(Path(__file__).parent))
from decode_half import Decode

NUM_PAGES = 192
PAGE_SIZE = 16
START_TIMEOUT_S = 60.0
#: Where all servers are, a GPU say (the first of its ranks'); else as they are without a flag.
DEVICE = os.environ.get("DECODE_TEST_DEVICE", "")
REPOSITORY = Path(__file__).parents[3]


class Server:
    """One service as a child process. It dies with this one."""

    def __init__(self, service: str, model: Path, folder: Path, *flags: str) -> None:
        self.service = service
        self.folder = folder
        self._ready_file = folder / f"{service}-{secrets.token_hex(4)}.json"
        self.log_path = self._ready_file.with_suffix(".log")
        command = [sys.executable, "-m", f"baton.{service}.app", "--model-path", str(model), "--model-name", "tiny", "--threads", "1"]
        command += ["--ready-file", str(self._ready_file), "--parent-pid", str(os.getpid()), "--page-size", str(PAGE_SIZE)]
        command += [*flags, *(("--device", DEVICE) if DEVICE else ())]
        for flag, default in (("--port", "0"), ("--num-pages", str(NUM_PAGES)), ("--drain-timeout-s", "10")):
            if flag not in flags:
                command += [flag, default]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"BATON_LOG_LEVEL": "debug"})
        self.record: dict[str, Any] = {}

    def wait_ready(self) -> Self:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready_file.exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.record = json.loads(self._ready_file.read_text())
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def address(self) -> str:
        return str(self.record["addresses"]["grpc"])

    @property
    def bootstrap(self) -> str:
        return str(self.record["addresses"]["bootstrap"])

    @property
    def instance_id(self) -> str:
        return str(self.record["instance_id"])

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """A clean end; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


class Fleet:
    """Starts servers and ends them all."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.servers: list[Server] = []

    def prefill(self, *flags: str) -> Server:
        extra = () if "--bootstrap-port" in flags else ("--bootstrap-port", "0")
        return self._start("prefill", *flags, *extra)

    def decode(self, *flags: str) -> Server:
        return self._start("decode", *flags)

    def plain(self, *flags: str) -> Server:
        return self._start("decode", "--role", "plain", *flags)

    def pair_of_servers(self, transport: str, prefill_flags: tuple[str, ...], decode_flags: tuple[str, ...]) -> tuple[Server, Server]:
        prefill, decode = self.prefill("--transport", transport, *prefill_flags), self.decode("--transport", transport, *decode_flags)
        return prefill.wait_ready(), decode.wait_ready()

    def _start(self, service: str, *flags: str) -> Server:
        server = Server(service, self.model, self.folder, *flags)
        self.servers.append(server)
        return server

    def close(self) -> None:
        """Ends what still runs, and looks for shared memory that outlives its owner: however a process ended, there must be none."""
        for server in self.servers:
            server.kill()
        assert left_behind({server.process.pid for server in self.servers}) == []


def left_behind(pids: set[int]) -> list[str]:
    """System V segments that one of `pids` made, and files in /dev/shm that name one."""
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    segments = [f"sysv segment {row[1]}" for row in rows if int(row[4]) in pids]
    return segments + [str(path) for path in Path("/dev/shm").iterdir() if any(str(pid) in path.name for pid in pids)]


class Room:
    """What one leg of a room said."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.base: int | None = None
        self.events: dict[str, worker_pb2.RoomEvent] = {}
        self.changed = asyncio.Event()

    @property
    def failure(self) -> common_pb2.Failure | None:
        event = self.events.get("failed")
        return None if event is None else event.failed

    @property
    def over(self) -> bool:
        return not {"transferred", "finished", "failed"}.isdisjoint(self.events)

    async def until(self, *kinds: str, timeout_s: float = 30.0) -> str:
        """Waits for the first of `kinds`."""
        async with asyncio.timeout(timeout_s):
            while True:
                for kind in kinds:
                    if kind in self.events:
                        return kind
                self.changed.clear()
                await self.changed.wait()

    async def until_over(self, timeout_s: float = 30.0) -> str:
        return await self.until("transferred", "finished", "failed", timeout_s=timeout_s)


class Leg:
    """A session with one worker."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.rooms: dict[int, Room] = {}
        self.load = worker_pb2.WorkerLoad()
        self.peers = worker_pb2.PeerStates()
        self.peers_changed = asyncio.Event()
        self.ended = asyncio.Event()
        self._writing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self.server.address, options=CHANNEL_OPTIONS)
        self.stub: Any = worker_pb2_grpc.WorkerStub(self._channel)
        self._call = self.stub.Session()
        await self.send(attach=worker_pb2.Attach(gateway_id="test", gateway_address="gateway.test:1"))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._call.cancel()
        await self._reader
        await self._channel.close()

    async def send(self, **command: Any) -> None:
        async with self._writing:  # a call takes one write at a time
            await self._call.write(worker_pb2.Command(**command))

    async def start(self, room: int, prompt: list[int], max_tokens: int, **leg: Any) -> Room:
        self.rooms[room] = Room()
        sampling = worker_pb2.Sampling(top_p=1.0, max_tokens=max_tokens)
        await self.send(start=worker_pb2.Start(room=room, prompt_token_ids=prompt, sampling=sampling, **leg))
        return self.rooms[room]

    def connected_to(self, prefill: Server) -> bool:
        return any(peer.prefill_instance_id == prefill.instance_id for peer in self.peers.peers)

    async def abort(self, room: int, origin: int = common_pb2.ORIGIN_CLIENT) -> None:
        await self.send(abort=worker_pb2.Abort(room=room, failure=common_pb2.Failure(code=1, origin=origin, cause="client_gone", message="left")))

    async def describe(self) -> worker_pb2.WorkerInfo:
        info: worker_pb2.WorkerInfo = await self.stub.Describe(worker_pb2.DescribeRequest(), timeout=10)
        return info

    async def until_load(self, holds: Callable[[worker_pb2.WorkerLoad], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds(load := (await self.describe()).load):
            assert time.monotonic() < deadline, f"{self.server.service}: not {what} within {timeout_s} s:\n{load}\n{self.server.log[-6000:]}"
            await asyncio.sleep(0.02)

    async def until_free(self, timeout_s: float = 10.0) -> None:
        """Waits until every page of the pool is free and no room is open."""
        await self.until_load(lambda load: load.free_pages == load.total_pages and load.rooms == 0, "all pages free", timeout_s)

    async def until_quarantined(self, num_pages: int, timeout_s: float = 10.0) -> None:
        await self.until_load(lambda load: load.quarantined_pages == num_pages, f"{num_pages} pages quarantined", timeout_s)

    async def _read(self) -> None:
        try:
            while isinstance(report := await self._call.read(), worker_pb2.Report):
                self._take(report)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        finally:
            self.ended.set()

    def _take(self, report: worker_pb2.Report) -> None:
        for number, index, token in zip(report.rooms, report.indexes, report.tokens, strict=True):
            room = self.rooms[number]
            room.base = index if room.base is None else room.base
            expected = room.base + len(room.tokens)
            assert index == expected, f"token {index} of room {number} where {expected} was due"
            room.tokens.append(token)
            room.changed.set()
        for event in report.events:
            room = self.rooms[event.room]
            kind = event.WhichOneof("event")
            assert kind not in room.events, f"room {event.room} said {kind} twice"
            room.events[kind] = event
            room.changed.set()
        if report.HasField("load"):
            self.load = report.load
        if report.HasField("peers"):
            self.peers = report.peers
            self.peers_changed.set()


class Pair:
    """A prefill and a decode server with a session each."""

    def __init__(self, prefill: Leg, decode: Leg) -> None:
        self.prefill = prefill
        self.decode = decode

    @staticmethod
    def draw() -> int:
        return secrets.randbits(63) or 1

    async def connect(self) -> None:
        """Tells decode its peer, and waits until the two are connected."""
        await self.decode.send(peers=worker_pb2.Peers(bootstrap_addresses=[self.prefill.server.bootstrap]))
        async with asyncio.timeout(30):
            while not self.decode.connected_to(self.prefill.server):
                self.decode.peers_changed.clear()
                await self.decode.peers_changed.wait()

    async def start_prefill(self, room: int, prompt: list[int], max_tokens: int, decode_instance_id: str | None = None, **more: Any) -> Room:
        leg = worker_pb2.PrefillLeg(decode_instance_id=decode_instance_id or self.decode.server.instance_id)
        return await self.prefill.start(room, prompt, max_tokens, prefill=leg, **more)

    async def start_decode(self, room: int, prompt: list[int], max_tokens: int, **more: Any) -> Room:
        server = self.prefill.server
        leg = worker_pb2.DecodeLeg(bootstrap_address=server.bootstrap, prefill_instance_id=server.instance_id)
        return await self.decode.start(room, prompt, max_tokens, decode=leg, **more)

    async def start(self, prompt: list[int], max_tokens: int) -> tuple[int, Room, Room]:
        number = self.draw()
        return number, await self.start_prefill(number, prompt, max_tokens), await self.start_decode(number, prompt, max_tokens)

    async def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """One request through both."""
        _, first, rest = await self.start(prompt, max_tokens)
        assert await first.until_over() == "transferred", first.failure
        assert await rest.until_over() == "finished", rest.failure
        assert list(first.events) == ["bootstrapped", "prefill_started", "transfer_started", "transferred"]
        assert list(rest.events) == ["reserved", "kv_ready", "finished"]
        return first.tokens + rest.tokens

    async def until_free(self, timeout_s: float = 10.0) -> None:
        await self.prefill.until_free(timeout_s)
        await self.decode.until_free(timeout_s)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers: real code paths, no meaning."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("tiny-model")
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.6)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def fleet(tiny_model: Path, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tiny_model, tmp_path)
    yield fleet
    fleet.close()


#: So small a step makes the prefill of a long prompt take long enough to be interrupted.
SLOW_PREFILL = ("--max-batched-tokens", "16", "--max-running", "16")
FAST = ((), ("--digest", "all"))
SLOW = ((*SLOW_PREFILL, "--unmatched-timeout-s", "1"), ("--digest", "all", "--revoke-timeout-s", "1", "--link-wait-s", "1"))

#: (transport, slow) -> a running pair
Servers = Callable[[str, bool], tuple[Server, Server]]


@pytest.fixture(scope="session")
def shared_servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One pair of processes a transport and speed, for tests that leave them as they were; digest check on."""
    fleet = Fleet(tiny_model, tmp_path_factory.mktemp("shared"))
    started: dict[tuple[str, bool], tuple[Server, Server]] = {}

    def get(transport: str, slow: bool) -> tuple[Server, Server]:
        if (transport, slow) not in started:
            started[transport, slow] = fleet.pair_of_servers(transport, *(SLOW if slow else FAST))
        return started[transport, slow]

    yield get
    statuses = [(server.service, server.stop()) for servers in started.values() for server in servers]
    fleet.close()
    assert {status for _, status in statuses} <= {0}, statuses


@pytest.fixture
async def pair(shared_servers: Servers, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Over the transport that the test's parameter names ("shm" without one). Afterwards every page must be free."""
    async with connected(*shared_servers(getattr(request, "param", "shm"), False)) as pair:
        yield pair
        await pair.until_free()


@pytest.fixture
async def slow_pair(shared_servers: Servers, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Like `pair`, with a prefill that can be caught in mid-transfer and a decode that soon calls a Revoke overdue."""
    async with connected(*shared_servers(getattr(request, "param", "shm"), True)) as pair:
        yield pair
        await pair.until_free()


@pytest.fixture
async def own_pair(fleet: Fleet, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Like `slow_pair`, with processes of its own: a test may do anything to them."""
    async with connected(*fleet.pair_of_servers(getattr(request, "param", "shm"), *SLOW)) as pair:
        yield pair


@contextlib.asynccontextmanager
async def connected(prefill: Server, decode: Server) -> AsyncIterator[Pair]:
    async with Leg(prefill) as first, Leg(decode) as second:
        pair = Pair(first, second)
        await pair.connect()
        yield pair


@pytest.fixture
def leg_type() -> type[Leg]:
    return Leg


@pytest.fixture
def pair_type() -> type[Pair]:
    return Pair


@pytest.fixture
def prompts() -> Callable[[int], list[int]]:
    """prompts(n): n token ids, other ones each time."""
    counter = itertools.count(1)

    def prompt(num_tokens: int) -> list[int]:
        seed = next(counter)
        return [(seed * 7919 + 31 * index * index + index) % 512 for index in range(num_tokens)]

    return prompt


@pytest.fixture
def make_decode() -> Iterator[Callable[..., Decode]]:
    made: list[Decode] = []

    def make(digests: str = "off") -> Decode:
        made.append(Decode(digests))
        return made[-1]

    yield make
    for decode in made:
        decode.close()


@pytest.fixture(name="decode")
def one_decode(make_decode: Callable[..., Decode]) -> Decode:
    return make_decode()
