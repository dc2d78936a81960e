"""Several gateway processes on one pair of ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Reply, ask, eventually, greedy, member, rest
from gateway_worker import ScriptedWorker, Shared, silence

from baton.gateway.config import GatewaySettings
from baton.gateway.model_folder import read_model_folder
from baton.gateway.processes.merge import MERGES
from baton.gateway.processes.ports import HeldPort, hold
from baton.gateway.processes.relay import choose
from baton.gateway.tokenizer import PromptTokenizer
from baton.servicekit import AddressUnavailableError, KeyRole, SettingsError, TlsSettings, new_key
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, inference_pb2_grpc, worker_pb2
from baton.workerkit.joining.gateway import GatewayAnnouncer

PROCESSES = 3


class Many:
    """A parent, its processes, and clients whose every connection may end at another one."""

    def __init__(self, parent: asyncio.subprocess.Process, log: Path, record: dict[str, Any]) -> None:
        self.parent, self.log, self.record = parent, log, record
        self.grpc_address, self.http = record["addresses"]["grpc"], f"http://{record['addresses']['http']}"
        self._exits = contextlib.AsyncExitStack()

    def lines(self, event: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line["event"] == event]

    def process_ids(self) -> dict[int, int]:
        """As last started."""
        return {line["process"]: line["process_id"] for line in self.lines("process started")}

    async def channel(self) -> grpc.aio.Channel:
        """A connection of its own."""
        channel = grpc.aio.insecure_channel(self.grpc_address, options=CHANNEL_OPTIONS)
        return await self._exits.enter_async_context(channel)

    async def ask(self) -> Reply:
        stub = inference_pb2_grpc.InferenceStub(await self.channel())
        return Reply([message async for message in stub.Generate(ask(), timeout=20)])

    async def all_answer(self) -> None:
        """Every process gets requests: connections are spread by the kernel."""
        answered: set[str] = set()
        async with asyncio.timeout(60):
            while len(answered) < PROCESSES:
                await self.ask()
                answered = {line["instance_id"] for line in self.lines("answered")}

    async def aclose(self) -> None:
        await self._exits.aclose()


@contextlib.asynccontextmanager
async def many(folder: Path, tmp_path: Path, *flags: str, processes: int = PROCESSES) -> AsyncIterator[Many]:
    log, ready_file = tmp_path / "gateway.log", tmp_path / "gateway.ready.json"
    settings = ["--port", "0", "--http-port", "0", "--ready-file", str(ready_file), "--model-path", str(folder), "--model-name", MODEL]
    command = [sys.executable, "-m", "baton.gateway.app", *settings, "--processes", str(processes), "--parent-pid", str(os.getpid()), *flags]
    with log.open("wb") as out:
        parent = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, start_new_session=True)
    try:
        await eventually(lambda: ready_file.exists() or parent.returncode is not None, 60.0)
        assert parent.returncode is None, log.read_text()
        one = Many(parent, log, json.loads(ready_file.read_text()))
        yield one
        await one.aclose()
    finally:
        if parent.returncode is None:
            parent.kill()
        await parent.wait()


@pytest.fixture
async def server(model_folder: Path) -> AsyncIterator[ScriptedWorker]:
    """A plain server."""
    tokenizer = PromptTokenizer(read_model_folder(model_folder))
    one = await ScriptedWorker("plain", Shared(lambda _: [3, 4, 5, 2]), "plain-0", vocab_size=tokenizer.vocab_size).start()
    yield one
    await one.kill()


def alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def test_all_serve_on_one_port_one_that_dies_is_started_anew_and_all_drain(model_folder: Path, tmp_path: Path, server: ScriptedWorker) -> None:
    async with many(model_folder, tmp_path, "--plain", server.address) as one:
        assert one.record["pid"] == one.parent.pid
        await eventually(lambda: len(server.attached) >= PROCESSES)
        await one.all_answer()
        assert len({attach.gateway_id for attach in server.attached}) == PROCESSES
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{one.http}/ready")).json()["ready"] is True
        victim = one.process_ids()[1]
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: one.process_ids()[1] != victim, 20)
        for _ in range(10):  # the dead process's port is nobody's: no connection waits for it
            assert (await one.ask()).ids
        assert one.lines("a process of the gateway ended")[0]["status"] == -signal.SIGKILL
        await eventually(lambda: len([line for line in one.lines("ready") if line["instance_id"].endswith("-1")]) == 2, 30)
        server.script = silence
        calls = []
        for _ in range(8):
            calls.append(inference_pb2_grpc.InferenceStub(await one.channel()).Generate(ask(sampling=greedy(max_tokens=2)), timeout=30))
            await calls[-1].read()
        await eventually(lambda: len([start for start in server.starts if start.sampling.max_tokens == 2]) == 8)
        one.parent.send_signal(signal.SIGTERM)
        await eventually(lambda: len(one.lines("draining")) == PROCESSES, 20)
        for start in server.starts:
            if start.sampling.max_tokens == 2:
                server.tokens(start.room, 0, [3, 4])
                over = worker_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=2)
                server.event(start.room, finished=over)
        for call in calls:
            assert (await rest(call))[-1].usage.completion_tokens == 2
        assert await asyncio.wait_for(one.parent.wait(), 30) == 0
        assert not any(alive(process_id) for process_id in one.process_ids().values())
        assert not (tmp_path / "gateway.ready.json").exists()


async def test_ctrl_c_drains_and_cuts_nothing_short(model_folder: Path, tmp_path: Path, server: ScriptedWorker) -> None:
    """A terminal signals its whole group; the processes are told by their parent alone, once."""
    async with many(model_folder, tmp_path, "--plain", server.address, processes=2) as one:
        server.script = silence
        call = inference_pb2_grpc.InferenceStub(await one.channel()).Generate(ask(sampling=greedy(max_tokens=2)), timeout=30)
        await call.read()
        start = await server.next_start()
        os.killpg(one.parent.pid, signal.SIGINT)
        await eventually(lambda: len(one.lines("draining")) == 2, 20)
        assert sorted(line["signal"] for line in one.lines("stopping")) == ["SIGINT", "SIGTERM", "SIGTERM"]
        server.tokens(start.room, 0, [3, 4])
        server.event(start.room, finished=worker_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=2))
        assert (await rest(call))[-1].usage.completion_tokens == 2
        assert await asyncio.wait_for(one.parent.wait(), 30) == 0


async def test_a_registration_reaches_every_process(model_folder: Path, tmp_path: Path, server: ScriptedWorker) -> None:
    admin_key, admin = new_key(KeyRole.ADMIN)
    client_key, client = new_key(KeyRole.CLIENT)
    keys = tmp_path / "keys"
    keys.write_text(f"{admin.line()}\n{client.line()}\n")
    async with many(model_folder, tmp_path, "--registration", "--api-key-file", str(keys), processes=2) as one:
        announcer = GatewayAnnouncer(one.grpc_address, member(server), 2, TlsSettings(), lambda: "")
        task = asyncio.create_task(announcer.run())
        await eventually(lambda: len({attach.gateway_id for attach in server.attached}) == 2, 20)
        victim = one.process_ids()[1]
        os.kill(victim, signal.SIGKILL)  # its successor knows nobody until the next heartbeat
        await eventually(lambda: len(server.attached) == 3, 30)
        fleet = fleet_pb2_grpc.FleetStub(await one.channel())
        by_admin = (("authorization", f"Bearer {admin_key}"),)

        async def known() -> list[tuple[str, bool, list[str]]]:
            listed = await fleet.List(fleet_pb2.ListWorkersRequest(), metadata=by_admin)
            return [(state.address, state.connected, list(state.sources)) for state in listed.workers]

        async with asyncio.timeout(20):  # the successor has reached the server, and hears from it a moment later
            while await known() != [(server.address, True, ["registered"])]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet.List(fleet_pb2.ListWorkersRequest(), metadata=(("authorization", f"Bearer {client_key}"),))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert caught.value.trailing_metadata()["grpc-status-details-bin"]  # type: ignore[index]
        await fleet.Remove(fleet_pb2.RemoveWorkerRequest(worker=fleet_pb2.WorkerName(address=server.address)), metadata=by_admin)
        listed = await fleet.List(fleet_pb2.ListWorkersRequest(), metadata=by_admin)
        assert not [state for state in listed.workers if not state.leaving]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def folder_of(process_id: int) -> Path:
    """Where the processes of one gateway answer each other."""
    flags = Path(f"/proc/{process_id}/cmdline").read_text().split("\0")
    folder = Path(flags[flags.index("--process-folder") + 1])
    assert folder.is_dir()
    return folder


async def test_a_parent_that_is_killed_takes_its_processes_and_their_folder_with_it(
    model_folder: Path, tmp_path: Path, server: ScriptedWorker
) -> None:
    async with many(model_folder, tmp_path, "--plain", server.address, processes=2) as one:
        processes = [*one.process_ids().values()]
        folder = folder_of(processes[0])
        one.parent.kill()
        await one.parent.wait()
        await eventually(lambda: not any(alive(process_id) for process_id in processes), 20)
        await eventually(lambda: not folder.exists(), 1)


async def test_what_a_process_cannot_use_is_said_once_and_ends_all(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    command = [sys.executable, "-m", "baton.gateway.app", "--port", "0", "--http-port", "0", "--model-path", str(empty), "--plain", "127.0.0.1:1"]
    parent = await asyncio.create_subprocess_exec(*command, "--processes", "2", stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(parent.communicate(), 60)
    assert parent.returncode == 2
    assert errors.decode().count("tokenizer.json is missing") == 1


def test_a_port_that_anybody_listens_on_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AddressUnavailableError, match="--http-port"):
        hold(("127.0.0.1", 0, "--port"), ("127.0.0.1", taken.getsockname()[1], "--http-port"))
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as shared, pytest.raises(AddressUnavailableError):
        HeldPort("127.0.0.1", shared.getsockname()[1], "--port")


def test_a_held_port_is_for_those_that_share_it() -> None:
    held = HeldPort("127.0.0.1", 0, "--port")
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", held.port))
    for _ in range(2):
        socket.create_server(("127.0.0.1", held.port), reuse_port=True).close()
    held.close()
    socket.create_server(("127.0.0.1", held.port)).close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--processes", "0"], ["--processes"]),
        (["--processes", "2", "--process-index", "1"], ["--process-folder"]),
        (["--processes", "2", "--process-index", "2", "--process-folder", "/x"], ["--process-index=2", "--processes=2"]),
        (["--processes", "2", "--instance-id", "g" * 62], ["62 characters", "at most 60"]),
    ],
)
def test_settings_that_do_not_fit(model_folder: Path, flags: list[str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        GatewaySettings.load(["--model-path", str(model_folder), "--plain", "127.0.0.1:1", *flags], {})
    assert all(word in str(caught.value) for word in words)


def refused(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


NOT_FOUND, AWAY = refused(grpc.StatusCode.NOT_FOUND), refused(grpc.StatusCode.UNAVAILABLE)


def test_which_answer_of_many_is_the_answer() -> None:
    beat, removed = fleet_pb2.HeartbeatResponse().SerializeToString(), fleet_pb2.RemoveWorkerResponse(rooms=2).SerializeToString()
    heartbeat, remove = "/baton.v1.Registry/Heartbeat", "/baton.v1.Fleet/Remove"
    assert choose(heartbeat, [beat, AWAY, beat]) == beat
    assert choose(heartbeat, [beat, NOT_FOUND]) is NOT_FOUND  # it registers again, with both
    assert choose(heartbeat, [AWAY, AWAY]) is AWAY
    assert fleet_pb2.RemoveWorkerResponse.FromString(choose(remove, [removed, NOT_FOUND, removed])).rooms == 4
    assert choose(remove, [AWAY, NOT_FOUND]) is NOT_FOUND
    services = (fleet_pb2.DESCRIPTOR.services_by_name[name] for name in ("Registry", "Fleet"))
    assert set(MERGES) == {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}


def test_lists_of_all_processes_are_one() -> None:
    def listed(ready: bool, *states: dict[str, Any], problems: tuple[str, ...] = ()) -> bytes:
        workers = [fleet_pb2.WorkerState(role=common_pb2.ROLE_PLAIN, **state) for state in states]
        return fleet_pb2.ListWorkersResponse(gateway_id="g", ready=ready, workers=workers, problems=problems).SerializeToString()

    both = choose(
        "/baton.v1.Fleet/List",
        [
            listed(True, {"address": "a:1", "rooms": 2, "connected": True, "sources": ["named"]}, problems=("one",)),
            listed(
                False, {"address": "a:1", "rooms": 3, "unusable_because": "away", "sources": ["named"]}, {"address": "b:1"}, problems=("one", "two")
            ),
        ],
    )
    whole = fleet_pb2.ListWorkersResponse.FromString(both)
    assert not whole.ready
    assert [(state.address, state.rooms, state.connected, state.unusable_because) for state in whole.workers] == [
        ("a:1", 5, False, "away"),
        ("b:1", 0, False, ""),
    ]
    assert list(whole.workers[0].sources) == ["named"]
    assert list(whole.problems) == ["one", "two"]
