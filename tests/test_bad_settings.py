"""What an operator can get wrong about ports and files: status 2, one line that names it, and nothing was loaded or listened on before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: The model's folder is empty: a server that looked into it would end with status 1 and say so.
MISTAKES = {
    "a ready file in no folder": (
        ["--ready-file", "/no/such/ready.json"],
        "--ready-file='/no/such/ready.json': no file can be written in '/no/such'",
    ),
    "no key": (["--tls-cert-file", "/no/cert", "--tls-key-file", "/no/key"], "--tls-key-file='/no/key': No such file"),
    "no authority": (["--tls-ca-file", "/no/ca"], "--tls-ca-file='/no/ca': No such file"),
    "no registration key": (
        ["--gateway-address", "a:1", "--registration-key-file", "/no/key"],
        "--registration-key-file='/no/key': No such file",
    ),
    "equal metrics port": (
        ["--port", "7000", "--metrics-port", "7000", "--metrics-exporter", "prometheus"],
        "--port and --metrics-port are both 7000",
    ),
    "equal sglang port": (["--port", "7000", "--sglang-port", "7000"], "--port and --sglang-port are both 7000"),
}
PREFILL = {
    "equal bootstrap port": (["--port", "7000", "--bootstrap-port", "7000"], "--port and --bootstrap-port are both 7000"),
    "no secrets": (["--ticket-secret-file", "/no/secrets"], "--ticket-secret-file='/no/secrets': No such file"),
}


@pytest.mark.parametrize(
    ("service", "flags", "said"),
    [
        pytest.param(service, *mistake, id=f"{service}: {name}")
        for service, mistakes in {"prefill": MISTAKES | PREFILL, "decode": MISTAKES}.items()
        for name, mistake in mistakes.items()
    ],
)
def test_a_mistake_is_named_before_a_model_is_looked_at(tmp_path: Path, service: str, flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", f"baton.{service}", "--model-path", str(tmp_path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert f"baton-{service}: {said}" in done.stderr
    assert "Traceback" not in done.stderr
