"""The benchmark's script runs, and finds every kernel correct, where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import DEVICE

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "kernels.py"
KERNELS = {
    "decode_attention",
    "prefill_attention",
    "fresh_attention",
    "linear_few",
    "linear_few in a row",
    "linear_invariant",
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
}
KERNELS |= {"rope_and_write", "sample", "gather_pages", "scatter_pages", "gather_heads", "page_digest", "moe_route", "grouped_linear"}

pytestmark = pytest.mark.skipif(DEVICE == "cuda" or not SCRIPT.exists(), reason="a GPU runs the script itself; a room alone has no benchmarks")


def lines(*options):
    ended = subprocess.run([sys.executable, SCRIPT, "--dry", *options], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_a_dry_run_measures_every_kernel():
    machine, *cases = lines()
    assert "interpreter" in machine["device"]
    assert {case["kernel"] for case in cases} == KERNELS
    assert all(case["correct"] and case["ms"] > 0 and case["floor_ms"] > 0 for case in cases)


def test_a_dry_sweep_finds_a_best_tiling():
    _, *swept = lines("--sweep", "--only", "linear")
    assert all(line["best"] and not line["refused"] for line in swept)
