"""`baton key new`, `list` and `ticket-secret`: files of keys for the services."""

import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.errors import UsageError
from baton.servicekit import KeyLimits, KeyRole, ServicekitError, new_key, read_api_keys

app = typer.Typer(help="Keys: make one for a client or an operator, list them, make secrets of room tickets.", no_args_is_help=True)

#: Read and written by its owner only.
_MODE = 0o600

File = Annotated[Path, typer.Option("--file", help="The file that the services read.", dir_okay=False)]
MadeFile = Annotated[Path, typer.Option("--file", help="The file that the services read; made when it is not there.", dir_okay=False)]
_OVERRIDES = "overrides the gateway's own limit for this key."
Answers = Annotated[int | None, typer.Option(min=1, help=f"Answers open or waiting, each of a request's several counted: {_OVERRIDES}")]
Requests = Annotated[int | None, typer.Option(min=1, help=f"Requests begun in a minute: {_OVERRIDES}")]
Tokens = Annotated[int | None, typer.Option(min=1, help=f"Tokens open or waiting, prompts and max_tokens together: {_OVERRIDES}")]


@app.command()
def new(
    file: MadeFile,
    role: Annotated[KeyRole, typer.Option(help="client: asks for answers; admin: changes the fleet.")] = KeyRole.CLIENT,
    max_concurrent: Answers = None,
    requests_per_minute: Requests = None,
    tokens_in_flight: Tokens = None,
    weight: Annotated[float, typer.Option(min=0.001, max=1000, help="Its share when several keys' requests wait, beside those of weight 1.")] = 1.0,
) -> None:
    """Makes a key, appends its hash to FILE and prints the key, once: it is kept nowhere. Running services take it within seconds."""
    text, key = new_key(role, KeyLimits(max_concurrent, requests_per_minute, tokens_in_flight, weight))
    _check_whole(file)
    _rewrite(file, _text(file) + key.line() + "\n")
    print(f"key {key.id} of role {role.value} is in {file}; this is the only time that it is shown:", file=sys.stderr)
    print(text)


@app.command("list")
def list_keys(file: File) -> None:
    """Shows ids, roles and limits."""
    try:
        keys = read_api_keys("--file", file)
    except ServicekitError as error:
        raise UsageError(str(error)) from error
    for key in keys:
        limits = " ".join(part for part in key.line().split()[3:])
        print(f"{key.id} {key.role.value:<6} {limits}".rstrip())


@app.command()
def remove(key_id: Annotated[str, typer.Argument(help="As `baton key list` shows it.")], file: File) -> None:
    """Takes a key out of FILE: it opens nothing any more once the services have read the file again."""
    _check_whole(file)
    lines = _text(file).splitlines(keepends=True)
    kept = [line for line in lines if line.split()[:1] != [key_id]]
    if len(kept) == len(lines):
        raise UsageError(f"there is no key {key_id!r} in {file}; `baton key list --file {file}` shows them")
    _rewrite(file, "".join(kept))


@app.command("ticket-secret")
def ticket_secret(file: MadeFile) -> None:
    """Puts a new secret of room tickets in front of those in FILE.

    Give the file to prefill servers first and to gateways when those have read it: the first secret signs, all of them verify.
    """
    _rewrite(file, secrets.token_urlsafe(48) + "\n" + _text(file))


def _check_whole(file: Path) -> None:
    if file.exists():
        try:
            read_api_keys("--file", file)
        except ServicekitError as error:
            raise UsageError(str(error)) from error


def _text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--file {str(file)!r} cannot be read: {error}") from error
    return text if not text or text.endswith("\n") else text + "\n"


def _rewrite(file: Path, text: str) -> None:
    """Whole or not at all: services may be reading it."""
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        Path(name).chmod(file.stat().st_mode & 0o777 if file.exists() else _MODE)
        Path(name).replace(file)
    except OSError as error:
        raise UsageError(f"--file {str(file)!r} cannot be written: {error.strerror or error}") from error
