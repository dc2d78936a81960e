"""The examples of docs/bench.md that need no server run as they are written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "bench.md"
EXAMPLES = re.findall(r"```console\n\$ baton (.*?)\n(.*?)```", PAGE.read_text(), flags=re.S)


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_prints_what_the_page_says(number: int) -> None:
    command, output = EXAMPLES[number]
    done = subprocess.run([sys.executable, "-m", "baton.cli.main", *shlex.split(command)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_every_flag_of_the_page_is_one_of_the_command() -> None:
    helps = "".join(
        subprocess.run(
            [sys.executable, "-m", "baton.cli.main", "bench", name, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"},
        ).stdout
        for name in ("run", "workload", "summary", "compare", "report")
    )
    for flag in set(re.findall(r"--[a-z][a-z0-9-]*", PAGE.read_text())):
        assert flag in helps, flag
