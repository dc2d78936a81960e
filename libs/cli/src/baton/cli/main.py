"""The `baton` command: each subcommand lives in a file of its own."""

import sys

import typer

from baton.cli import model_commands
from baton.cli.chat import chat
from baton.cli.errors import CliError

typer_app = typer.Typer(help="Prefill-decode disaggregated LLM serving.", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
typer_app.command()(chat)
typer_app.add_typer(model_commands.app, name="model")


def app() -> None:
    """Entry point. A CliError is one explained line and exit status 1; anything else is a defect and keeps its traceback."""
    try:
        typer_app()
    except CliError as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(1)
