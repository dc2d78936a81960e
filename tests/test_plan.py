"""`baton plan calibrate` against real servers, from the first prompt to a prediction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fleet import MODEL, Fleet

from baton.bench import load_run
from baton.bench.plan import ServerLimits, from_runs, load_calibration

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

BATON = (sys.executable, "-m", "baton.cli.main")
STAGES = 8


def baton(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((*BATON, *arguments), capture_output=True, text=True, timeout=500, check=False, cwd=folder)


def test_a_plain_server_and_a_pair_are_calibrated(plain_fleet: Fleet, shm_fleet: Fleet, tmp_path: Path) -> None:
    urls = ("--plain", f"grpc://{plain_fleet.grpc}", "--split", f"grpc://{shm_fleet.grpc}")
    done = baton(tmp_path, "plan", "calibrate", *urls, "--model", MODEL, "--longest-words", "64", "--most-rows", "2", "--requests", "4")
    runs = {name: [load_run(path) for path in sorted(tmp_path.glob(f"calibration-samples/*/{name}.jsonl"))] for name in ("plain", "split")}
    assert [len(found) for found in runs.values()] == [STAGES, STAGES], done.stderr[-2000:]
    assert all(sample.error is None for found in runs.values() for run in found for sample in run.samples)
    measured = from_runs(runs["plain"], runs["split"], ServerLimits(), "here")
    assert len({point.tokens for point in measured.plain.first}) >= 3
    assert len(measured.plain.decode) >= 8
    assert len(measured.split.transfers) == sum(len(run.samples) for run in runs["split"])
    assert all(transfer.num_bytes > 0 and transfer.busy_s for transfer in measured.split.transfers)
    if done.returncode:  # other work on this machine: the refusal is what is promised then, and the samples stay
        assert "is believed" in done.stderr
        return
    found = load_calibration(tmp_path / "calibration.json")
    assert found.costs.steps.decode_s(1, 10) > 0
    assert found.costs.path is not None
    assert found.costs.path.kv_bytes_per_token > 1000
    predicted = baton(tmp_path, "plan", "predict", "calibration.json", "--servers", "2", "--servers", "1:1", "--requests", "50", "--seeds", "2")
    assert (predicted.returncode, "1P:1D" in predicted.stdout) == (0, True), predicted.stderr
