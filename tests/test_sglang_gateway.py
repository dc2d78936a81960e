"""A gateway that we did not write, smg, drives one prefill and one decode server over SGLang's scheduler contract, beside our own gateway."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import MODEL, Fleet, free_port, wait_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="smg is not installed: pip install smg (requirements/dev.txt names it)"),
]

QUESTIONS = ("What is the capital of France?", "Count from one to ten.", "Write a haiku about a relay race. " * 20)
#: Long enough that somebody can leave in its middle; it ends by length only, because the prompt asks for no end.
ENDLESS = {"messages": [{"role": "user", "content": "Count upwards from one, one number a line, and never stop."}], "max_tokens": 700}
CHUNK_TOKENS = 64
READY_S = 120.0
FREE_S = 20.0


class Smg:
    """The real gateway, as a child process."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        prefill, decode = fleet.by_kind("prefill"), fleet.by_kind("decode")
        self.http = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "smg.log"
        command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", self.http.rpartition(":")[2]]
        command += ["--prometheus-port", str(free_port()), "--pd-disaggregation", "--health-check-interval-secs", "1"]
        command += ["--prefill", f"grpc://{prefill.address('sglang')}", prefill.address("bootstrap").rpartition(":")[2]]
        command += ["--decode", f"grpc://{decode.address('sglang')}"]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        wait_for(self._serves, READY_S, lambda: self.log.read_text()[-3000:])

    def _serves(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return ask(self.http, "Hello.", max_tokens=1).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def body(question: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0.0, "max_tokens": 24, **more}


def ask(http: str, question: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{http}/v1/chat/completions", json=body(question, **more), timeout=60)


def answer(http: str, question: str) -> dict[str, Any]:
    """The whole answer, as the client reads it."""
    response = ask(http, question)
    assert response.status_code == 200, f"{http}: {response.status_code} {response.text}"
    whole: dict[str, Any] = response.json()
    return whole


def text_of(http: str, question: str) -> str:
    return str(answer(http, question)["choices"][0]["message"]["content"])


def streamed(http: str, question: str, **more: Any) -> tuple[str, str, int]:
    """Text, finish reason, number of parts with text."""
    text, reason, parts = "", "", 0
    with httpx.stream("POST", f"{http}/v1/chat/completions", json=body(question, stream=True, **more), timeout=60) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                for choice in json.loads(line[6:])["choices"]:
                    piece = choice["delta"].get("content") or ""
                    text, parts = text + piece, parts + bool(piece)
                    reason = choice["finish_reason"] or reason
    return text, reason, parts


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Our own gateway leads the same two servers. Small chunks: a long prompt is many steps."""
    fleet = Fleet(model_path, tmp_path_factory.mktemp("sglang"))
    fleet.prefill("--transport", "shm", "--sglang-port", str(free_port()), "--max-batched-tokens", str(CHUNK_TOKENS))
    fleet.decode("--transport", "shm", "--sglang-port", str(free_port()), "--digest", "all")
    yield fleet.start()
    fleet.close()


@pytest.fixture(scope="module")
def smg(fleet: Fleet) -> Iterator[Smg]:
    gateway = Smg(fleet, fleet.run_dir)
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.kill()


@pytest.fixture(autouse=True)
def clean(fleet: Fleet) -> Iterator[None]:
    yield
    fleet.assert_free(FREE_S)


def test_answers_are_those_of_our_own_gateway(fleet: Fleet, smg: Smg) -> None:
    ours = f"http://{fleet.http}"
    for question in QUESTIONS:
        theirs, own = answer(smg.http, question), answer(ours, question)
        assert theirs["choices"][0]["message"]["content"] == own["choices"][0]["message"]["content"] != ""
        assert theirs["choices"][0]["finish_reason"] == own["choices"][0]["finish_reason"]
        for count in ("prompt_tokens", "completion_tokens"):
            assert theirs["usage"][count] == own["usage"][count]


def test_streamed_answers_are_the_same(fleet: Fleet, smg: Smg) -> None:
    ours = f"http://{fleet.http}"
    for question in QUESTIONS[:2]:
        text, reason, parts = streamed(smg.http, question)
        assert (text, reason) == streamed(ours, question)[:2]
        assert parts > 4


def test_many_at_once(fleet: Fleet, smg: Smg) -> None:
    questions = [f"{question} ({number})" for number in range(4) for question in QUESTIONS[:2]]
    with ThreadPoolExecutor(8) as threads:
        theirs = list(threads.map(lambda question: text_of(smg.http, question), questions))
    ours = f"http://{fleet.http}"
    assert theirs == [text_of(ours, question) for question in questions]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"logprobs": True}, "return_logprob"),
        ({"response_format": {"type": "json_object"}}, "sampling_params.json_schema"),
        ({"max_tokens": 99_999}, "max_tokens=99999 is outside"),
    ],
)
def test_what_is_not_made_is_refused_by_name(smg: Smg, more: dict[str, Any], said: str) -> None:
    refusal = ask(smg.http, QUESTIONS[0], **more)
    assert refusal.status_code == 400, refusal.text
    assert said in refusal.json()["error"]["message"]


def test_a_client_that_leaves_in_mid_answer(fleet: Fleet, smg: Smg) -> None:
    with httpx.stream("POST", f"{smg.http}/v1/chat/completions", json=body("", stream=True, **ENDLESS), timeout=60) as response:
        lines = (line for line in response.iter_lines() if '"content":"' in line and '"content":""' not in line)
        next(lines)
        assert fleet.by_kind("decode").info().load.rooms == 1
    fleet.assert_free(FREE_S)


def test_a_client_that_leaves_before_the_first_token(fleet: Fleet, smg: Smg) -> None:
    """The prompt is computed in many steps; there is a room on both servers when the client goes, and most of the prompt is never computed."""
    prefill = fleet.by_kind("prefill")
    prompt = body("Tell me about zebras and quartz. " * 500)
    steps = prefill.info().load.steps
    with leaving(smg.http, prompt):
        wait_for(lambda: all(worker.info().load.rooms for worker in fleet.workers), 20, "a room on both servers")
        wait_for(lambda: prefill.info().load.steps > steps, 20, "a step of its prompt")
    fleet.assert_free(FREE_S)
    tokens_computed = (prefill.info().load.steps - steps) * CHUNK_TOKENS
    assert tokens_computed < 500 * 6, "the whole prompt was computed for nobody"


@contextlib.contextmanager
def leaving(http: str, request: dict[str, Any]) -> Iterator[None]:
    """A client whose request is on its way within the block, and who hangs up at its end."""
    host, _, port = http.rpartition("/")[2].partition(":")
    text = json.dumps(request).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + text)
        yield


def test_a_decode_server_that_is_killed_and_comes_back(fleet: Fleet, smg: Smg) -> None:
    decode, prefill = fleet.by_kind("decode"), fleet.by_kind("prefill")
    before = decode.info().instance_id
    with httpx.stream("POST", f"{smg.http}/v1/chat/completions", json=body("", stream=True, **ENDLESS), timeout=60) as response:
        lines = response.iter_lines()
        while '"content":"' not in (line := next(lines)) or '"content":""' in line:
            pass
        decode.kill()
        try:
            rest = list(lines)
        except httpx.TransportError:
            rest = []
    assert not any('"finish_reason":"length"' in line or '"finish_reason":"stop"' in line for line in rest), rest[-2:]
    wait_for(lambda: prefill.info().load.free_pages == prefill.info().load.total_pages, FREE_S, "prefill free of it")
    decode.start().wait_ready()
    fleet.note_pids()
    assert decode.info().instance_id != before
    smg.wait_ready()
    ours = f"http://{fleet.http}"
    wait_for(fleet.ready, READY_S, "our gateway ready again")
    assert text_of(smg.http, QUESTIONS[0]) == text_of(ours, QUESTIONS[0])


def test_a_gateway_that_is_killed_in_mid_answer(fleet: Fleet, smg: Smg) -> None:
    """The last one: it takes the gateway with it."""
    with httpx.stream("POST", f"{smg.http}/v1/chat/completions", json=body("", stream=True, **ENDLESS), timeout=60) as response:
        next(line for line in response.iter_lines() if '"content":"' in line and '"content":""' not in line)
        smg.kill()
    fleet.assert_free(FREE_S)
