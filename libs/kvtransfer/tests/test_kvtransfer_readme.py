"""The README's example is run as it stands."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_two_process_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [name for name, _ in blocks] == ["receiver.py", "sender.py"]
    port = str(free_port())
    for name, code in blocks:
        assert "7777" in code
        (tmp_path / name).write_text(code.replace("7777", port), encoding="utf-8")
    with subprocess.Popen([sys.executable, tmp_path / "receiver.py"], stdout=subprocess.PIPE, text=True) as receiver:
        try:
            deadline = time.monotonic() + 30
            while not listening(int(port)):
                assert receiver.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            sender = subprocess.run([sys.executable, tmp_path / "sender.py"], capture_output=True, text=True, timeout=60, check=True)
            said, _ = receiver.communicate(timeout=30)
        finally:
            receiver.kill()
    assert sender.stdout in {f"done: 4194304 bytes over {path}\n" for path in ("sysv", "posix")}
    assert said == "waiting for the sender\nroom 7001: 64 tokens, first token 17\nnothing can be written any more: True\n"


def listening(port: int) -> bool:
    """Whether somebody listens, without connecting (the example takes one connection)."""
    rows = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    return any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows)
