"""`docker stop` right after `docker run`: process 1 of a pid namespace, started as the images start it, ends at a signal in its first second.

The kernel keeps from process 1 what it has no handler for, so a signal that comes before there is one would be lost.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
#: Each in a namespace of its own, whose other processes end with it.
NAMESPACE = ("unshare", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), "--pid", "--fork", "--kill-child")
FOLDERS = {"gateway": "services/gateway", "prefill": "services/prefill", "decode": "services/decode", "cli": "libs/cli"}
ENDS_WITHIN_S = 2.0
MOMENTS_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.6, 1.2)

#: What takes long to import, or comes with it.
HEAVY = ("torch", "numpy", "grpc", "pydantic", "uvloop", "opentelemetry", "typer", "rich", "asyncio", "logging")


def why_no_namespace() -> str:
    """Empty when there can be one."""
    try:
        done = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        return f"unshare: {error.strerror} (Debian: util-linux)"
    return done.stderr.strip() if done.returncode else ""


def image_command(name: str) -> list[str]:
    """The entry point of its Dockerfile, with this interpreter."""
    match = re.search(r"^ENTRYPOINT (\[.*\])$", (ROOT / FOLDERS[name] / "Dockerfile").read_text(), re.MULTILINE)
    assert match, f"{name}'s Dockerfile has no entry point"
    words = json.loads(match[1])
    assert "python" in words
    return [sys.executable if word == "python" else word for word in words]


class FirstProcess:
    """`command` as process 1 of a pid namespace."""

    def __init__(self, command: list[str]) -> None:
        self.around = subprocess.Popen([*NAMESPACE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_python(self) -> int:
        """Its process id here, once Python is started in it: what came before was `unshare`, or `env`."""
        deadline = time.monotonic() + 20
        children = Path(f"/proc/{self.around.pid}/task/{self.around.pid}/children")
        while True:
            assert self.around.poll() is None, self.around.communicate()
            assert time.monotonic() < deadline, "no Python was started"
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] == sys.executable.encode():
                    return int(pid)
            time.sleep(0.001)

    def end(self) -> tuple[int, float, str]:
        """Exit status, seconds that it took from now, standard error."""
        began = time.monotonic()
        try:
            _, said = self.around.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.around.kill()  # and with it the process inside
            _, said = self.around.communicate()
        return self.around.returncode, time.monotonic() - began, said


@pytest.fixture
def namespaces() -> None:
    reason = why_no_namespace()
    if reason:
        pytest.skip(f"no process was number 1 of a pid namespace: {reason}")


def arguments_of(name: str, folder: Path) -> list[str]:
    """With which a service would load for seconds."""
    fleet = ["--plain", "127.0.0.1:1", "--http-port", "0"] if name == "gateway" else []
    return ["--model-path", str(folder), "--port", "0", *fleet]


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", ["gateway", "prefill", "decode"])
def test_a_signal_in_the_first_second_ends_a_service(name: str, number: signal.Signals, model_path: Path) -> None:
    """With 0: it owed nothing to anyone."""
    for moment_s in MOMENTS_S:
        status, said = stopped_after(moment_s, [*image_command(name), *arguments_of(name, model_path)], number)
        assert status == 0, said
        assert "Traceback" not in said


@pytest.mark.usefixtures("namespaces")
def test_a_signal_in_the_first_second_ends_the_command() -> None:
    """With 143: what it was to do is not done."""
    for moment_s in MOMENTS_S[:4]:
        status, said = stopped_after(moment_s, [*image_command("cli"), "--help"], signal.SIGTERM)
        assert status == 128 + signal.SIGTERM, said


def stopped_after(moment_s: float, command: list[str], number: signal.Signals) -> tuple[int, str]:
    """Exit status and standard error of a process 1 that gets a signal so long after Python was started in it."""
    first = FirstProcess(command)
    pid = first.wait_python()
    time.sleep(moment_s)
    os.kill(pid, number)
    status, took_s, said = first.end()
    print(f"{number.name} after {moment_s:g} s: status {status} after {took_s:.2f} s")
    assert took_s < ENDS_WITHIN_S, said
    return status, said


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("module", ["baton.gateway.app", "baton.prefill.app", "baton.decode.app"])
def test_the_module_that_launchers_start_answers_as_well(module: str, model_path: Path) -> None:
    """Without `env`: from the moment on when Python runs it."""
    name = module.split(".")[1]
    first = FirstProcess([sys.executable, "-m", module, *arguments_of(name, model_path)])
    pid = first.wait_python()
    deadline = time.monotonic() + 20
    while not catches(pid, signal.SIGTERM):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    loaded = Path(f"/proc/{pid}/maps").read_text()
    os.kill(pid, signal.SIGTERM)
    status, took_s, said = first.end()
    assert (status, took_s < ENDS_WITHIN_S) == (0, True), said
    assert "stopped before it was ready (SIGTERM)" in said
    assert "uvloop" not in loaded, "the handler came after the heavy imports"


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for it."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("package", ["baton.gateway", "baton.prefill", "baton.decode", "baton.cli"])
def test_nothing_heavy_is_imported_before_signals_are_answered(package: str) -> None:
    script = f"import sys, {package}.__main__; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert sorted(set(HEAVY) & set(done.stdout.split())) == []


def test_a_command_that_is_not_process_1_ends_by_the_signal_itself() -> None:
    script = "import os, signal, baton.entry; baton.entry.answer_as_process_1(); os.kill(os.getpid(), signal.SIGTERM); print('lives')"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False).returncode == -signal.SIGTERM
