"""`baton chat`: one answer, or a conversation, streamed from a gateway."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Annotated

import typer
from rich.console import Console

from baton.cli import reaching as to
from baton.cli.client import Answer, ChatOptions, GatewayClient, connect
from baton.cli.errors import UsageError
from baton.cli.report import failure_facts, print_report

Turns = list[tuple[str, str]]


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="What to say; without it a conversation starts (or standard input is read, if it is a pipe).")
    ] = None,
    address: to.Address = to.DEFAULT_ADDRESS,
    model: Annotated[str | None, typer.Option(help="Which model; needed only if the gateway serves several.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one answer; by default what is left of the context.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler; by default the gateway draws one.")] = None,
    report: Annotated[bool, typer.Option("--report", help="After each answer, show where its time went and what moved.")] = False,
    api_key_file: to.ApiKeyFile = None,
    tls_ca_file: to.TlsCaFile = None,
    tls_cert_file: to.TlsCertFile = None,
    tls_key_file: to.TlsKeyFile = None,
) -> None:
    """Talks to a running gateway; answers appear as they are made."""
    if prompt is not None and not prompt.strip():
        raise UsageError("PROMPT is empty; give some text, or leave it out to start a conversation")
    turns: Turns = [] if system is None else [("system", system)]
    options = ChatOptions(model or "", temperature, max_tokens, seed, report)
    found = to.reach(api_key_file, tls_ca_file, tls_cert_file, tls_key_file)
    asyncio.run(_converse(connect(address, found), model, options, turns, prompt))


async def _converse(
    connection: AbstractAsyncContextManager[GatewayClient], model: str | None, options: ChatOptions, turns: Turns, prompt: str | None
) -> None:
    async with connection as client:
        options = options.with_model(await client.model_or_only(model))
        said = iter([prompt]) if prompt is not None else _lines_or_all()
        # Reading a terminal blocks; nothing else runs on this loop meanwhile.
        for text in said:
            turns.append(("user", text))
            answer = await say(client, options, turns, Console())
            turns.append(("assistant", answer.text))


async def say(client: GatewayClient, options: ChatOptions, turns: Turns, console: Console) -> Answer:
    """Streams one answer to standard output, then its report if asked for; that servers failed on the way is told in any case."""
    written: list[str] = []

    def write(text: str) -> None:
        written[:] = [text]
        _write(text)

    try:
        answer = await client.chat(options, turns, write)
    except BaseException:
        if written:
            _write("\n")  # what is said of the failure is no part of the answer
        raise
    _write("\n")
    if answer.finish == "length":
        console.print("(cut off: the limit of tokens was reached)", style="dim", highlight=False)
    if answer.report is not None and options.report:
        console.print()
        print_report(console, answer.report)
    elif answer.report is not None:
        for name, value in failure_facts(answer.report):
            console.print(f"({name}: {value})", style="dim", markup=False, highlight=False)
    return answer


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _lines_or_all() -> Iterator[str]:
    """Lines typed at a terminal until Ctrl-D; from a pipe, all of it at once."""
    if not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        if not text:
            raise UsageError("standard input is empty; give PROMPT as an argument or pipe some text in")
        yield text
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line
