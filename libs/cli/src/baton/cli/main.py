"""The `baton` command: each subcommand lives in a file of its own."""

import sys

import typer

from baton.cli import bench_commands, fleet_commands, key_commands, model_commands, plan_commands
from baton.cli.chat import chat
from baton.cli.decide import decide
from baton.cli.demo import demo
from baton.cli.errors import CliError
from baton.cli.services import StopAskedError
from baton.cli.up import up

typer_app = typer.Typer(help="Prefill-decode disaggregated LLM serving.", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
for command in (up, chat, demo, decide):
    typer_app.command()(command)
typer_app.add_typer(model_commands.app, name="model")
typer_app.add_typer(bench_commands.app, name="bench")
typer_app.add_typer(plan_commands.app, name="plan")
typer_app.add_typer(key_commands.app, name="key")
typer_app.add_typer(fleet_commands.app, name="fleet")


def app() -> None:
    """Entry point. A CliError is one explained line and exit status 1; any other exception is a defect and keeps its traceback."""
    try:
        typer_app()
    except CliError as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(1)
    except StopAskedError:
        sys.exit(130)


if __name__ == "__main__":
    app()
