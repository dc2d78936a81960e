"""`baton plan` and `baton bench report` from the command line: what they print, and what they refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "plan-h200.json"


def baton(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd)


def test_predictions_are_json_and_the_same_each_time() -> None:
    flags = ("plan", "predict", str(EXAMPLE), "--servers", "1:2", "--requests", "60", "--seeds", "2", "--rate", "3", "--link-gbit", "100", "--json")
    first, again = (baton(*flags) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    (found,) = json.loads(first.stdout)
    assert (found["shape"]["num_prefill"], found["shape"]["num_decode"], found["num_requests"]) == (1, 2, 120)
    assert found["figures"]["ttft_p50_ms"]["low"] <= found["figures"]["ttft_p50_ms"]["high"]


def test_objectives_that_nothing_meets_are_an_exit_status() -> None:
    found = baton("plan", "size", str(EXAMPLE), "--rate", "1", "--ttft-ms", "500", "--itl-p99-ms", "1")
    assert found.returncode == 1
    assert found.stdout.count("itl_p99_ms is 1.0, but must be at least") == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("plan", "predict", "CALIBRATION", "--servers", "2:"), "--servers is '2:'"),
        (("plan", "predict", "CALIBRATION", "--servers", "1", "--arrivals", "trace"), "arrivals is 'trace'"),
        (("plan", "predict", "CALIBRATION", "--servers", "1", "--pool-tokens", "64"), "num_pages is 4, but must be at least"),
        (("plan", "predict", "CALIBRATION", "--servers", "1", "--ttft-ms", "5"), "goodput needs both"),
        (("plan", "size", "CALIBRATION", "--rate", "1", "--ttft-ms", "5", "--itl-p99-ms", "5", "--kinds", "poem"), "--kinds is 'poem'"),
        (("plan", "predict", "EMPTY", "--servers", "1"), "is not a calibration of version 1"),
        (("plan", "fit", "FOLDER"), "decide.json"),
        (("bench", "report", "FOLDER"), "holds neither decide.json nor run files"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    places = {"CALIBRATION": str(EXAMPLE), "EMPTY": "empty.json", "FOLDER": "folder"}
    found = baton(*(places.get(argument, argument) for argument in arguments), cwd=tmp_path)
    assert found.returncode == 1
    assert named in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_a_run_against_nobody_has_a_report_and_no_calibration(tmp_path: Path) -> None:
    flags = ("--model", "m", "--requests", "5", "--warm-up", "1", "--arrivals", "closed", "--prompt-words", "4", "--out", str(tmp_path))
    assert baton("bench", "run", "--target", "http://127.0.0.1:9/v1", *flags).returncode == 1
    reported = baton("bench", "report", str(tmp_path))
    assert (reported.returncode, reported.stdout.split()) == (0, [str(tmp_path / f"report.{ending}") for ending in ("html", "md", "json")])
    fitted = baton("plan", "fit", str(tmp_path / "target.jsonl"), cwd=tmp_path)
    assert (fitted.returncode, "0 steps of decode rows alone were seen" in fitted.stderr) == (1, True)
    assert not (tmp_path / "calibration.json").exists()
