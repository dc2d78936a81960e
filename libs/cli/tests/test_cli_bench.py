"""`baton bench` without a server: what it prints, what it refuses, and a run against nobody."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BATON = (sys.executable, "-m", "baton.cli.main", "bench")


def bench(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BATON, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_a_workload_is_printed_and_is_the_same_each_time() -> None:
    first, again = (bench("workload", "--seed", "1", "--show", "3") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    lines = first.stdout.splitlines()
    assert json.loads(lines[0])["workload"] == "chat"
    assert [line.split(":")[0] for line in lines[1:]] == ["0", "1", "2"]


def test_a_whole_workload_is_json_lines() -> None:
    found = bench("workload", "--workload", "fixed", "--prompt-words", "5", "--show", "2", "--full")
    requests = [json.loads(line) for line in found.stdout.splitlines()]
    assert [len(request["messages"][0]["content"].split()) for request in requests] == [5, 5]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("workload", "--workload", "poem"), "workload is 'poem'"),
        (("workload", "--workload", "sharegpt"), "name it with --file"),
        (("run", "--target", "ftp://x", "--model", "m"), "target is 'ftp://x', but must be grpc://HOST:PORT"),
        (("run", "--target", "a/b=grpc://x:1", "--model", "m"), "the target's name is 'a/b'"),
        (("run", "--target", "grpc://x:1", "--model", "m", "--api", "poem"), "--api is 'poem'"),
        (("run", "--target", "grpc://x:1", "--model", "m", "--ttft-ms", "5"), "goodput needs both"),
        (("run", "--target", "grpc://x:1", "--model", "m", "--arrivals", "trace"), "have no times"),
        (("run", "--target", "grpc://x:1", "--model", "m", "--rate", "0"), "rate_rps is 0.0"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    found = bench(*arguments, cwd=tmp_path)
    assert found.returncode == 1
    assert named in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_a_run_against_nobody_fails_and_says_why(tmp_path: Path) -> None:
    flags = ("--model", "m", "--requests", "5", "--warm-up", "1", "--arrivals", "closed", "--prompt-words", "4", "--out", str(tmp_path))
    found = bench("run", "--target", "one=http://127.0.0.1:9/v1", "--target", "two=http://127.0.0.1:9/v1", *flags)
    assert found.returncode == 1
    assert "no request was answered" in found.stderr
    assert json.loads((tmp_path / "one.json").read_text())["errors"] == {"connect": 5}
    assert "5 of 5 requests failed" in (tmp_path / "two.md").read_text()
    again = bench("summary", str(tmp_path / "one.jsonl"))
    assert (again.returncode, "connect: 5" in again.stdout) == (0, True)
    compared = bench("compare", str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl"))
    assert (compared.returncode, "both runs answered 0 requests" in compared.stderr) == (1, True)
