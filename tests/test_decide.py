"""`baton decide` with real servers: a tiny run from start to verdict, and one that is interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.bench import load_run
from baton.bench.decide import load

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

BATON = (sys.executable, "-m", "baton.cli.main")
CORES = sorted(os.sched_getaffinity(0))
DEVICES = f"cpu:{CORES[0]},cpu:{CORES[-1]}"
TINY = (
    *("--quick", "--prompt-words", "4", "--document-words", "24", "--answer-tokens", "3"),
    *("--start-rate", "2", "--cell-s", "2", "--budget-s", "2", "--repeats", "0", "--ttft-ms", "60000", "--itl-p99-ms", "60000"),
)


def test_a_tiny_run_from_start_to_verdict(tmp_path: Path, model_path: Path) -> None:
    command = (*BATON, "decide", "--model", str(model_path), "--devices", DEVICES, "--out", str(tmp_path), *TINY)
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = load(tmp_path)
    assert [topology.name for topology in found.topologies] == ["one", "copies", "split-1-1"]
    assert found.equality.different == ()
    assert {cell.topology for cell in found.cells} == {"one", "copies", "split-1-1"}
    for cell in found.cells:
        assert (cell.num_failed, cell.num_good) == (0, cell.num_requests), cell
        run = load_run(tmp_path / cell.samples)
        assert len(run.samples) == cell.num_requests
        assert ("kv_bytes" in cell.server) == (cell.topology == "split-1-1")
    paths = {point.transport for point in found.idle if point.topology == "split-1-1"}
    assert len(paths) == 1
    assert None not in paths
    assert found.verdict is not None
    assert {server.device for server in found.servers} == set(DEVICES.split(","))
    assert done.stdout == (tmp_path / "decide.md").read_text()
    assert done.stdout.startswith(f"# {found.verdict.headline}")
    again = subprocess.run((*BATON, "decide", "--verdict-of", str(tmp_path)), capture_output=True, text=True, timeout=60, check=True)
    assert again.stdout == done.stdout
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (refused.returncode, "is not written over" in refused.stderr) == (1, True)


def _until_there_are_some(process: psutil.Process) -> list[psutil.Process]:
    deadline = time.monotonic() + 30
    while not (children := process.children(recursive=True)):
        assert time.monotonic() < deadline, "no server was started"
        time.sleep(0.02)
    return children


def test_an_interrupt_leaves_no_process(tmp_path: Path, model_path: Path) -> None:
    command = (*BATON, "decide", "--model", str(model_path), "--devices", DEVICES, "--out", str(tmp_path), *TINY)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("starting "):
                break
        children = _until_there_are_some(psutil.Process(running.pid))
        time.sleep(0.5)  # somewhere within the start
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()
        assert running.wait(120) == 130, rest
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert re.search("^stopping$", rest, flags=re.M)
