"""Every Python example of docs/clients.md, and the three services by hand of the README, run as they are written, but for the ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import Fleet, free_port

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "clients.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(shm_fleet: Fleet, number: int) -> None:
    code = EXAMPLES[number].replace("127.0.0.1:8000", shm_fleet.http).replace("127.0.0.1:8001", shm_fleet.grpc)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "capital of France" in code:
        assert "Paris" in done.stdout
    shm_fleet.assert_free()


def test_three_services_by_hand(model_path: Path, tmp_path: Path) -> None:
    (code,) = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    for port in ("8003", "8998", "8004", "8001", "8000"):
        assert port in code
        code = code.replace(port, str(free_port()))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["bash", "-eu", "-c", code],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            answer, log = shell.communicate(timeout=240)
        finally:
            left = _end_group(shell.pid)
    assert shell.returncode == 0, log[-4000:]
    assert not left, "the services did not end with the example"
    assert "blue" in answer, (answer, log[-4000:])
    assert not any(line.startswith("{") for line in [*answer.splitlines(), *log.splitlines()]), "the services' logs are between the answer"
    logs = [tmp_path / f"{name}.log" for name in ("prefill", "decode", "gateway")]
    assert all("ready" in file.read_text() for file in logs)


def _end_group(pid: int) -> bool:
    """Ends what the shell left; whether it left anything."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
