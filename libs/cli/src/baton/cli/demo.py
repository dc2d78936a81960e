"""`baton demo`: the whole system once: fetch the model, start the services, one streamed answer, where its time went, stop."""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from baton.cli.chat import say
from baton.cli.client import Answer, ChatOptions, connect
from baton.cli.errors import CallError
from baton.cli.fleet import FleetOptions, Transport
from baton.cli.services import StopAskedError, Supervisor
from baton.cli.up import ModelOption, RunningFleet, TransportOption, VerboseOption, print_addresses, resolve_model, running_fleet

PROMPT = "What is the capital of France? Answer in one sentence."
WATCH_POLL_S = 0.05

T = TypeVar("T")


def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = PROMPT,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.", min=1)] = 128,
    model: ModelOption = "smollm2",
    transport: TransportOption = Transport.AUTO,
    verbose: VerboseOption = False,
) -> None:
    """Fetches the model, starts gateway, prefill and decode, asks one question, shows where the time went, and stops everything."""
    console = Console()
    model_path, model_name = resolve_model(model)
    options = FleetOptions(model_path, model_name, transport=transport, digest="all", http_port=0, grpc_port=0, bootstrap_port=0)
    with running_fleet(options, drain_timeout_s=10.0, console=console, verbose=verbose) as fleet:
        print_addresses(console, fleet)
        asked = ChatOptions(model_name, max_tokens=max_tokens, report=True)
        answer = asyncio.run(watched(fleet.supervisor, _ask(fleet, asked, prompt, console)))
        check_answer(answer)


async def _ask(fleet: RunningFleet, options: ChatOptions, prompt: str, console: Console) -> Answer:
    console.print(f"\n> {prompt}", markup=False, highlight=False)
    async with connect(fleet.addresses.grpc) as client:
        return await say(client, options, [("user", prompt)], console)


def check_answer(answer: Answer) -> None:
    """Raises CallError if the call succeeded and yet proves nothing."""
    if not answer.text.strip():
        raise CallError("the answer is empty")
    if answer.report is None or not answer.report.states:
        raise CallError("the gateway sent no report of the room")


async def watched(supervisor: Supervisor, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, cancelled when a service is lost (ServiceLostError) or a stop is asked for (StopAskedError)."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=WATCH_POLL_S)
            supervisor.tick()
            if not task.done():
                supervisor.check()
            if supervisor.stop_asked:
                raise StopAskedError
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])
