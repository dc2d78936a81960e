"""The example of docs/decide.md runs as it is written, and every flag of the page is one of the command it names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "decide.md").read_text()
EXAMPLES = re.findall(r"```console\n\$ baton (.*?)\n(.*?)```", PAGE, flags=re.S)


def output_of(*command: str) -> str:
    plain = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=plain)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_what_the_page_says() -> None:
    assert EXAMPLES
    for command, output in EXAMPLES:
        assert output_of("-m", "baton.cli.main", *shlex.split(command)).startswith(output)


def test_every_flag_of_the_page_is_one_of_a_command() -> None:
    helps = output_of("-m", "baton.cli.main", "decide", "--help")
    helps += "".join(output_of(f"benchmarks/{name}.py", "--help") for name in ("injections", "generators"))
    helps += "--dtype --load-format"  # a server's, handed on by --worker-flag
    for flag in set(re.findall(r"--[a-z][a-z0-9-]*", PAGE)):
        assert flag in helps, flag
