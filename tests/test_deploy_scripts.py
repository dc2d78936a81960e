"""The scripts of deploy/: what probes ask, what a smoke test asks, and certificates that services and clients accept of one another."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fleet import Fleet, free_port

pytestmark = pytest.mark.integration

SCRIPTS = Path(__file__).parents[1] / "deploy" / "scripts"


def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPTS / name), *words], capture_output=True, text=True, timeout=120, check=False)


def test_probes_and_the_smoke_test_of_a_fleet_that_serves(shm_fleet: Fleet, tmp_path: Path) -> None:
    for address in (shm_fleet.grpc, *(worker.address() for worker in shm_fleet.workers)):
        assert script("healthy.py", address).returncode == 0, address
    ready_file = tmp_path / "ready.json"
    ready_file.write_text(json.dumps({"addresses": {"grpc": shm_fleet.grpc}}))
    assert script("healthy.py", "--ready-file", str(ready_file)).returncode == 0
    done = script("smoke.py", f"http://{shm_fleet.http}")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["ready", "live", "model", "chat", "stream", "refusal"]


def test_what_is_not_there_is_told(shm_fleet: Fleet, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    for words, told in (
        (("healthy.py", nobody), "does not answer: UNAVAILABLE"),
        (("healthy.py", "--ready-file", str(tmp_path / "none.json")), "the service is not ready yet, or has ended"),
        (("smoke.py", f"http://{nobody}"), "FAILED ready: not ready within 0 s"),
        (("smoke.py", f"http://{shm_fleet.http}", "--model", "other"), "FAILED model: serves ['smollm2'], not other"),
    ):
        done = script(*words)
        assert done.returncode == 1, words
        assert told in done.stderr


def test_certificates_are_accepted_by_both_sides_and_by_nobody_else(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    for folder in (ours, others):
        done = script("development_ca.py", str(folder), "gateway=gateway,*.prefill.baton.svc", "client")
        assert done.returncode == 0, done.stderr
    assert handshake(ours / "gateway", ours / "client", "gateway") is None
    assert handshake(ours / "gateway", ours / "client", "prefill-0.prefill.baton.svc") is None
    assert "Hostname mismatch" in str(handshake(ours / "gateway", ours / "client", "decode"))
    assert handshake(ours / "gateway", others / "client", "gateway") is not None
    assert (ours / "gateway" / "key.pem").stat().st_mode & 0o077 == 0


def test_certificates_are_made_anew_by_the_same_authority_only_when_they_end_soon(tmp_path: Path) -> None:
    script("development_ca.py", str(tmp_path), "gateway")
    authority, first = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "gateway" / "cert.pem").read_bytes()
    assert script("development_ca.py", str(tmp_path), "gateway").stdout == ""
    assert (tmp_path / "gateway" / "cert.pem").read_bytes() == first
    assert script("development_ca.py", str(tmp_path), "decode", "--days", "0.001").returncode == 0
    short = (tmp_path / "decode" / "cert.pem").read_bytes()
    assert script("development_ca.py", str(tmp_path), "decode").returncode == 0, "one that is past its time is made anew"
    assert ((tmp_path / "decode" / "cert.pem").read_bytes() != short, (tmp_path / "ca.pem").read_bytes() == authority) == (True, True)


def handshake(server: Path, client: Path, name: str) -> Exception | None:
    """What the client or the server had against the other; None when a byte went each way."""
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=server / "ca.pem")
    serving.load_cert_chain(server / "cert.pem", server / "key.pem")
    serving.verify_mode = ssl.CERT_REQUIRED
    asking = ssl.create_default_context(cafile=client / "ca.pem")
    asking.load_cert_chain(client / "cert.pem", client / "key.pem")
    near, far = socket.socketpair()
    failed: list[Exception] = []

    def serve() -> None:
        try:
            with serving.wrap_socket(far, server_side=True) as connection:
                connection.sendall(connection.recv(1))
        except OSError as error:
            failed.append(error)
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with asking.wrap_socket(near, server_hostname=name) as connection:
            connection.sendall(b".")
            assert connection.recv(1) == b"."
    except OSError as error:
        failed.insert(0, error)
        near.close()
    thread.join(10)
    return failed[0] if failed else None
