"""The `baton` command: each subcommand lives in a file of its own."""

import sys

if __name__ == "__main__":  # `python -m baton.cli.main` is `python -m baton.cli`: signals are answered before the imports below
    from baton.cli.__main__ import main as start

    start()
    sys.exit()

from importlib.metadata import version
from typing import Annotated

import typer

from baton.cli import bench_commands, fleet_commands, key_commands, model_commands, plan_commands
from baton.cli.chat import chat
from baton.cli.decide import decide
from baton.cli.demo import demo
from baton.cli.errors import CliError, OutputGoneError
from baton.cli.output import explained_output
from baton.cli.services import StopAskedError
from baton.cli.top import top
from baton.cli.up import up

typer_app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def show_version(*, wanted: bool) -> None:
    if wanted:
        print(f"baton {version('baton-cli')}")
        raise typer.Exit


@typer_app.callback()
def baton(
    wanted: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=lambda value: show_version(wanted=value))
    ] = False,
) -> None:
    """Prefill-decode disaggregated LLM serving."""


for command in (up, chat, top, demo, decide):
    typer_app.command()(command)
typer_app.add_typer(model_commands.app, name="model")
typer_app.add_typer(bench_commands.app, name="bench")
typer_app.add_typer(plan_commands.app, name="plan")
typer_app.add_typer(key_commands.app, name="key")
typer_app.add_typer(fleet_commands.app, name="fleet")


def app() -> None:
    """Entry point. A CliError is one explained line and exit status 1; any other exception is a defect and keeps its traceback."""
    try:
        with explained_output():
            typer_app()
    except OutputGoneError:
        sys.exit(1)
    except CliError as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(1)
    except StopAskedError:
        sys.exit(130)
