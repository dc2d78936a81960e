"""The gateway as a process of its own: what launchers, operators and orchestrators see."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, ask, eventually, greedy, rest, says
from gateway_worker import LENGTH, ScriptedWorker, Shared, silence
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.gateway import app
from baton.gateway.model_folder import read_model_folder
from baton.gateway.tokenizer import PromptTokenizer
from baton.wire.status import failure_from_error
from baton.wire.v1 import common_pb2, inference_pb2_grpc, worker_pb2

SECRET = "the-prompt-that-nobody-may-log"


class Process:
    def __init__(self, process: asyncio.subprocess.Process, log: Path, ready_file: Path) -> None:
        self.process = process
        self.log = log
        self.ready_file = ready_file
        self.record: dict[str, Any] = json.loads(ready_file.read_text())
        self.http = f"http://{self.record['addresses']['http']}"
        self.channel = grpc.aio.insecure_channel(self.record["addresses"]["grpc"])
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    async def serving(self) -> bool:
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest())  # type: ignore[misc]
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def workers(folder: Path) -> AsyncIterator[list[ScriptedWorker]]:
    tokenizer = PromptTokenizer(read_model_folder(folder))
    shared = Shared(lambda _: says(tokenizer, "the answer is forty two"))
    started = [await ScriptedWorker(role, shared, f"{role}-0", vocab_size=tokenizer.vocab_size).start() for role in ("prefill", "decode")]
    try:
        yield started
    finally:
        for worker in started:
            await worker.kill()


@asynccontextmanager
async def gateway(folder: Path, tmp_path: Path, fleet: list[ScriptedWorker], **environ: str) -> AsyncIterator[Process]:
    log, ready_file = tmp_path / "gateway.log", tmp_path / "gateway.ready.json"
    command = [sys.executable, "-m", "baton.gateway.app", "--port", "0", "--http-port", "0", "--ready-file", str(ready_file)]
    named = {"BATON_GATEWAY_PREFILL": fleet[0].address, "BATON_GATEWAY_DECODE": fleet[1].address}  # flags and variables are one
    settings = {"BATON_GATEWAY_MODEL_PATH": str(folder), "BATON_GATEWAY_MODEL_NAME": MODEL, "BATON_GATEWAY_PARENT_PID": str(os.getpid())}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | named | settings | environ, stdout=out, stderr=out)
    try:
        await eventually(ready_file.exists, 20.0)
        one = Process(process, log, ready_file)
        for _ in range(500):
            if await one.serving():
                break
            await asyncio.sleep(0.01)
        yield one
        await one.channel.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def fleet(model_folder: Path) -> AsyncIterator[list[ScriptedWorker]]:
    async with workers(model_folder) as started:
        yield started


async def test_a_life_from_ready_file_to_sigterm(model_folder: Path, tmp_path: Path, fleet: list[ScriptedWorker]) -> None:
    async with gateway(model_folder, tmp_path, fleet) as one:
        assert one.record["pid"] == one.process.pid
        assert one.record["service"] == "gateway"
        assert set(one.record["addresses"]) == {"grpc", "http"}
        async with httpx.AsyncClient(base_url=one.http) as http:
            assert (await http.get("/ready")).json()["ready"] is True
            messages = [{"role": "user", "content": SECRET}]
            answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}, timeout=20)
            assert answer.json()["choices"][0]["message"]["content"] == "the answer is forty two"
            refused = await http.post("/v1/completions", json={"model": MODEL, "prompt": SECRET * 100})
            assert refused.status_code == 400
        one.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(one.process.wait(), 15) == 0
        assert not one.ready_file.exists()
        room = fleet[0].starts[0].room
        states = [(line["before"], line["state"]) for line in one.lines() if line["event"] == "room"]
        assert [states[0][0], *(state for _, state in states)][-1] == "SUCCESS"
        assert states[0][0] == "BOOTSTRAPPING"
        assert [before for before, _ in states[1:]] == [state for _, state in states[:-1]]  # one line a change
        of_request = [line for line in one.lines() if "request_id" in line and line["event"] != "request refused"]
        assert {line["event"] for line in of_request} == {"room opened", "room", "answered"}
        assert {line["room"] for line in of_request} == {room}
        text = one.log.read_text()
        assert SECRET not in text
        assert "forty two" not in text


async def test_sigterm_lets_an_open_stream_end(model_folder: Path, tmp_path: Path, fleet: list[ScriptedWorker]) -> None:
    async with gateway(model_folder, tmp_path, fleet) as one:
        for worker in fleet:
            worker.script = silence
        call = one.stub.Generate(ask(sampling=greedy(max_tokens=3)), timeout=20)
        await call.read()
        room = (await fleet[0].next_start()).room
        await fleet[1].next_start()
        one.process.send_signal(signal.SIGTERM)
        for _ in range(500):
            if not await one.serving():
                break
            await asyncio.sleep(0.01)
        assert not await one.serving()
        async with httpx.AsyncClient(base_url=one.http) as http:
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in one.stub.Generate(ask(), timeout=5):
                pass
        assert failure_from_error(caught.value, origin=common_pb2.ORIGIN_CLIENT, cause="").cause == "gateway_draining"
        fleet[0].tokens(room, 0, [100])
        fleet[0].event(room, transferred=worker_pb2.Transferred())
        fleet[1].event(room, kv_ready=worker_pb2.KvReady())
        fleet[1].tokens(room, 1, [101, 102])
        fleet[1].event(room, finished=worker_pb2.Finished(reason=LENGTH, completion_tokens=3))
        assert (await rest(call))[-1].finish_reason == LENGTH
        assert await asyncio.wait_for(one.process.wait(), 15) == 0


async def test_sigterm_ends_a_stream_that_does_not(model_folder: Path, tmp_path: Path, fleet: list[ScriptedWorker]) -> None:
    async with gateway(model_folder, tmp_path, fleet, BATON_GATEWAY_DRAIN_TIMEOUT_S="0.3") as one:
        for worker in fleet:
            worker.script = silence
        call = one.stub.Generate(ask(), timeout=20)
        await call.read()
        await fleet[0].next_start()
        streaming = asyncio.create_task(_stream_until_error(one.http))
        await fleet[0].next_start(2)
        fleet[0].tokens(fleet[0].starts[1].room, 0, [100])
        await asyncio.sleep(0.2)
        one.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        failure = failure_from_error(caught.value, origin=common_pb2.ORIGIN_CLIENT, cause="")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (failure.cause, failure.origin, failure.allowed_ms) == ("gateway_stopped", common_pb2.ORIGIN_GATEWAY, 300)
        assert (await streaming)["code"] == "gateway_stopped"
        assert await asyncio.wait_for(one.process.wait(), 15) == 0
        await fleet[0].wait(lambda: len(fleet[0].aborts) == 2)
        assert {abort.failure.origin for abort in fleet[0].aborts} == {common_pb2.ORIGIN_GATEWAY}


async def _stream_until_error(http: str) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with httpx.AsyncClient(base_url=http, timeout=20) as client, client.stream("POST", "/v1/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: ") and "error" in (data := json.loads(line.removeprefix("data: "))):
                error: dict[str, Any] = data["error"]
                return error
    raise AssertionError("the stream ended without an error")


async def test_a_launcher_that_is_killed_takes_the_gateway_with_it(model_folder: Path, tmp_path: Path, fleet: list[ScriptedWorker]) -> None:
    async with AsyncExitStack() as exits:
        parent = await asyncio.create_subprocess_exec("sleep", "60")
        one = await exits.enter_async_context(gateway(model_folder, tmp_path, fleet, BATON_GATEWAY_PARENT_PID=str(parent.pid)))
        parent.kill()
        await parent.wait()
        assert await asyncio.wait_for(one.process.wait(), 15) == 0


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton.gateway.app", *arguments], env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False
    )


def with_places(arguments: list[str], model_folder: Path, tmp_path: Path) -> list[str]:
    places = {"FOLDER": str(model_folder), "EMPTY": str(tmp_path)}
    return [places.get(argument, argument) for argument in arguments]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--model-path", "required"]),
        (["--model-path", "EMPTY", "--plain", "a:1"], ["tokenizer.json is missing"]),
        (["--model-path", "FOLDER", "--plain", "a:1", "--api-key-file", "/no/keys"], ["--api-key-file='/no/keys': No such file"]),
        (
            ["--model-path", "FOLDER", "--plain", "a:1", "--tls-cert-file", "/no/cert", "--tls-key-file", "/no/key"],
            ["--tls-key-file='/no/key': No such file"],
        ),
    ],
)
def test_a_bad_setting_stops_the_start_and_names_itself(model_folder: Path, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    ended = run(*with_places(arguments, model_folder, tmp_path))
    assert ended.returncode == 2
    for word in words:
        assert word in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-path", "FOLDER"], ["no servers are named"]),
        (["--model-path", "FOLDER", "--prefill", "a:1"], ["--prefill is set and --decode is not"]),
        (["--model-path", "FOLDER", "--plain", "nowhere"], ["--plain='nowhere': 'nowhere' is not host:port"]),
        (["--model-path", "FOLDER", "--plain", "a:1,a:1"], ["a:1 more than once"]),
        (["--model-path", "/no/such", "--plain", "a:1"], ["/no/such", "no such folder"]),
        (["--model-path", "FOLDER", "--plain", "a:1", "--waiting-timeout-s", "0"], ["--waiting-timeout-s='0'"]),
        (["--model-path", "FOLDER", "--plain", "a:1", "--ready-file", "/no/such/ready.json"], ["--ready-file='/no/such/ready.json'", "'/no/such'"]),
        (["--model-path", "FOLDER", "--plain", "a:1", "--port", "7000", "--http-port", "7000"], ["--port and --http-port are both 7000"]),
    ],
)
def test_before_anything_is_begun(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    """What the settings alone tell ends `main` where it reads them: so it can be called here, where a process would take a second for its imports."""
    monkeypatch.setattr(sys, "argv", ["baton-gateway", *with_places(arguments, model_folder, tmp_path)])
    monkeypatch.setattr(app, "configure_logs", None)  # what comes next
    assert app.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("baton-gateway: ")
    for word in words:
        assert word in said


def test_an_address_that_is_taken_stops_the_start(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments in (("--port", "0", "--http-port", port), ("--port", port, "--http-port", "0")):
            ended = run("--model-path", str(model_folder), "--plain", "127.0.0.1:1", *arguments)
            assert ended.returncode == 1
            assert f"127.0.0.1:{port}" in ended.stderr
            assert "Traceback" not in ended.stderr


def test_the_gateway_never_reaches_torch() -> None:
    code = """
import sys
import baton.gateway.app
heavy = {"torch", "triton", "numpy", "transformers", "baton.engine", "baton.kernels", "baton.kvtransfer", "baton.workerkit"}
print(sorted(heavy & {*sys.modules, *(name.partition(".")[0] for name in sys.modules)}))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"


def test_the_face_of_the_package() -> None:
    import baton.gateway

    assert baton.gateway.__all__ == sorted(baton.gateway.__all__)
    assert all(hasattr(baton.gateway, name) for name in baton.gateway.__all__)
