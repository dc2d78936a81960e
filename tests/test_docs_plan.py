"""The example of docs/plan.md runs as it is written, and every flag of the page is one of the command."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "plan.md").read_text()


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)


def test_the_example_prints_what_the_page_says() -> None:
    ((command, output),) = re.findall(r"```console\n\$ baton (.*?)\n(.*?)```", PAGE, flags=re.S)
    done = baton(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_every_flag_of_the_page_is_one_of_the_command() -> None:
    helps = "".join(
        subprocess.run(
            [sys.executable, "-m", "baton.cli.main", "plan", name, "--help"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"},
        ).stdout
        for name in ("calibrate", "fit", "predict", "size")
    )
    for flag in set(re.findall(r"--[a-z][a-z0-9-]*", PAGE)):
        assert flag in helps, flag
