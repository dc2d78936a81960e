"""What a newcomer tries first."""

from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from baton.cli.main import typer_app


def test_version() -> None:
    result = CliRunner().invoke(typer_app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"baton {version('baton-cli')}\n")


@pytest.mark.parametrize(("command", "makes"), [("new", True), ("ticket-secret", True), ("list", False), ("remove", False)])
def test_help_says_which_commands_make_the_file_of_keys(command: str, makes: bool) -> None:
    text = " ".join(CliRunner().invoke(typer_app, ["key", command, "--help"], env={"COLUMNS": "200"}).output.split())
    assert ("made when it is not there" in text) is makes
