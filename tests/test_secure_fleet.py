"""A whole fleet behind mutual TLS, tickets and API keys: certificates of another authority while it serves, and nothing secret in any log."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from fleet import Fleet, Worker, wait_for

from baton.servicekit import KeyRole, new_key
from baton.wire.v1 import inference_pb2, worker_pb2
from baton.wire.v1.inference_pb2_grpc import InferenceStub
from baton.wire.v1.worker_pb2_grpc import WorkerStub

pytestmark = [pytest.mark.integration, pytest.mark.long]

MODEL = "smollm2"
KEY, RECORD = new_key(KeyRole.CLIENT)
STRANGER, _ = new_key(KeyRole.CLIENT)
ADMIN, ADMIN_RECORD = new_key(KeyRole.ADMIN)
TICKET_SECRET = "marked-ticket-secret-" + os.urandom(16).hex()
#: What no log may hold. The words are the model's own tokens, so that prompts of ids would spell them too.
PROMPT = "The password of the zebra is xylophone-quartz-7391."


class Pki:
    """Files of one side, which an operator replaces while services read them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.authority = trustme.CA()
        self.write()

    def write(self) -> None:
        certificate = self.authority.issue_cert("localhost", "127.0.0.1")
        self._put("key.pem", certificate.private_key_pem.bytes())
        self._put("cert.pem", b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        self._put("ca.pem", self.authority.cert_pem.bytes())

    def _put(self, name: str, data: bytes) -> None:
        (self.folder / f"{name}.new").write_bytes(data)
        (self.folder / f"{name}.new").rename(self.folder / name)

    def file(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")

    def flags(self) -> tuple[str, ...]:
        return ("--tls-cert-file", self.file("cert"), "--tls-key-file", self.file("key"), "--tls-ca-file", self.file("ca"))

    def channel(self, address: str) -> grpc.Channel:
        pem = {name: (self.folder / f"{name}.pem").read_bytes() for name in ("ca", "key", "cert")}
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(pem["ca"], pem["key"], pem["cert"]))

    def http(self, **more: object) -> httpx.Client:
        import ssl

        context = ssl.create_default_context(cafile=self.file("ca"))
        context.load_cert_chain(self.file("cert"), self.file("key"))
        return httpx.Client(verify=context, timeout=60, **more)  # type: ignore[arg-type]


class SecureWorker(Worker):
    pki: Pki

    def info(self) -> worker_pb2.WorkerInfo:
        with self.pki.channel(self.address()) as channel:
            return WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=10)


class SecureFleet(Fleet):
    """Every service under the same authority, at debug level."""

    def __init__(self, model_path: Path, run_dir: Path, pki: Pki) -> None:
        super().__init__(model_path, run_dir)
        self.pki = pki

    def _worker(self, service: str, *flags: str) -> Worker:
        worker = super()._worker(service, *flags, *self.pki.flags(), "--log-level", "debug", "--log-format", "json")
        worker.__class__ = SecureWorker
        worker.pki = self.pki  # type: ignore[attr-defined]
        return worker

    def ready(self) -> bool:
        try:
            with self.pki.http() as client:
                return client.get(f"https://{self.http}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, key: str = KEY) -> httpx.Response:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        with self.pki.http() as client:
            return client.post(f"https://{self.http}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    def ask_grpc(self, key: str = KEY) -> str:
        request = inference_pb2.GenerateRequest(model=MODEL, text=PROMPT, sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=8))
        with self.pki.channel(self.grpc) as channel:
            call = InferenceStub(channel).Generate(request, timeout=60, metadata=(("authorization", f"Bearer {key}"),))
            return "".join(message.text for message in call)

    def log(self) -> str:
        return "".join(worker.running.log_path.read_text() for worker in self._all())


@pytest.fixture(scope="module")
def secure(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureFleet]:
    folder = tmp_path_factory.mktemp("secure")
    tickets = ("--ticket-secret-file", str(folder / "tickets"))
    (folder / "tickets").write_text(TICKET_SECRET + "\n")
    (folder / "keys").write_text(f"{RECORD.line()}\n{ADMIN_RECORD.line()}\n")
    fleet = SecureFleet(model_path, folder / "run", Pki(folder / "pki"))
    try:
        fleet.prefill(*tickets)
        fleet.decode()
        yield fleet.start(*tickets, "--api-key-file", str(folder / "keys"), *fleet.pki.flags(), "--log-level", "debug", "--log-format", "json")
    finally:
        fleet.close()


@pytest.mark.parametrize("scheme", ["grpc", "https"])
def test_every_command_shows_its_certificate_and_its_key(secure: SecureFleet, scheme: str, tmp_path: Path) -> None:
    address = secure.grpc if scheme == "grpc" else f"{secure.http}/v1"
    bench = (
        "bench",
        "run",
        "--target",
        f"{scheme}://{address}",
        "--model",
        MODEL,
        "--requests",
        "2",
        "--warm-up",
        "0",
        "--out",
        str(tmp_path / "out"),
    )
    shape = ("--workload", "fixed", "--prompt-words", "5", "--answer-tokens", "4", "--arrivals", "closed")
    commands = [(*bench, *shape)]
    if scheme == "grpc":
        commands += [("chat", "hello", "--max-tokens", "4", "--address", address), ("fleet", "list", "--address", address)]
    for command in commands:
        file = tmp_path / "key"
        file.write_text(ADMIN if command[0] == "fleet" else KEY)
        for flags, is_let_in in ((secure.pki.flags(), True), (secure.pki.flags()[4:], False)):
            ended = subprocess.run(
                [sys.executable, "-m", "baton.cli.main", *command, "--api-key-file", str(file), *flags],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert (ended.returncode == 0) is is_let_in, (command, ended.stdout, ended.stderr)


def test_no_secret_and_no_prompt_is_in_any_log(secure: SecureFleet) -> None:
    """At debug level, over requests that go well, badly and nowhere."""
    fleet = secure
    assert fleet.ask().status_code == 200
    fleet.ask_grpc()
    fleet.ask(STRANGER)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10**7}
    with fleet.pki.http(headers={"authorization": f"Bearer {KEY}"}) as client:
        url = f"https://{fleet.http}/v1"
        assert client.post(f"{url}/completions", json=body).status_code == 400
        chat = [{"role": "user", "content": PROMPT}]
        assert client.post(f"{url}/chat/completions", json={"model": MODEL, "messages": chat, "max_tokens": 4}).status_code == 200
        assert client.post(f"{url}/chat/completions", json={"model": MODEL, "messages": [{"role": "nobody", "content": PROMPT}]}).status_code == 400
        assert client.post(f"{url}/completions", content=PROMPT.encode()).status_code == 400
        with client.stream("POST", f"{url}/completions", json=body | {"max_tokens": 200, "stream": True}) as stream:
            next(stream.iter_lines())  # and is gone
    for worker in fleet.workers:
        with fleet.pki.channel(worker.address()) as channel, pytest.raises(grpc.RpcError):
            list(InferenceStub(channel).Generate(inference_pb2.GenerateRequest(model=MODEL, text=PROMPT), timeout=10))
    fleet.assert_free()
    _check_log(fleet.log(), fleet.pki)


def test_everything_locked_and_every_lock_changed_while_it_serves(secure: SecureFleet) -> None:
    fleet = secure
    answer = fleet.ask().json()["choices"][0]["text"]
    assert answer
    assert fleet.ask_grpc() == answer
    assert fleet.ask(STRANGER).status_code == 401
    with pytest.raises(grpc.RpcError) as caught:
        fleet.ask_grpc(STRANGER)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(fleet.by_kind("prefill").address()) as channel, pytest.raises(grpc.RpcError):
        WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=5)

    # another authority: its certificate and ours, in every service, without a restart
    fleet.pki.authority = trustme.CA()
    fleet.pki.write()
    wait_for(lambda: fleet.log().count("files reloaded") >= 3, 30, "all three services with new files")
    assert fleet.ask().json()["choices"][0]["text"] == answer  # over the connections between services that were there before

    # a prefill server that is killed and comes again meets services that have the new files, over new connections
    prefill = fleet.by_kind("prefill")
    prefill.kill()
    prefill.start().wait_ready()
    fleet.note_pids()
    wait_for(fleet.ready, 60, "the gateway ready again")
    assert fleet.ask().json()["choices"][0]["text"] == answer
    assert fleet.ask_grpc() == answer
    fleet.assert_free()
    _check_log(fleet.log(), fleet.pki)


def _check_log(text: str, pki: Pki) -> None:
    assert text.count("room opened") >= 4  # the log is there
    secrets = [PROMPT, "xylophone", "quartz-7391", TICKET_SECRET, KEY, KEY.split("-", 2)[2], STRANGER, STRANGER.split("-", 2)[2], RECORD.digest.hex()]
    private = (pki.folder / "key.pem").read_text().splitlines()[1]
    assert [secret for secret in [*secrets, private] if secret in text] == []
    assert RECORD.id in text  # a key is named by its id
