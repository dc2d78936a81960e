"""Every Python example of docs/clients.md runs as it is written, but for the ports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import Fleet

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[1] / "docs" / "clients.md"
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
