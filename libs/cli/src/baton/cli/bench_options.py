"""Flags that more than one subcommand of `baton bench` has."""

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.arrivals import ARRIVAL_NAMES
from baton.bench.workload.catalogue import NAMES

WorkloadName = Annotated[str, typer.Option("--workload", help=f"One of {', '.join(NAMES)}.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides every prompt, length and arrival.")]
File = Annotated[Path | None, typer.Option("--file", help="The ShareGPT or Mooncake file.", exists=True, dir_okay=False)]
PromptWords = Annotated[int | None, typer.Option(help="Words of a (chat, fixed, turn) prompt; about one token each.")]
AnswerTokens = Annotated[int | None, typer.Option(help="Tokens of an answer.")]
DocumentWords = Annotated[int | None, typer.Option(help="chat: words of a pasted document.")]
DocumentShare = Annotated[float | None, typer.Option(help="chat: part of the requests that carry a document.")]
Sessions = Annotated[int | None, typer.Option(help="turns: conversations at a time.")]
Turns = Annotated[int | None, typer.Option(help="turns: turns of a conversation.")]
SharedWords = Annotated[int | None, typer.Option(help="turns: words of the system prompt that all share.")]
LengthScale = Annotated[float | None, typer.Option(help="mooncake: shrink its lengths by this factor.")]
ArrivalName = Annotated[str, typer.Option("--arrivals", help=f"One of {', '.join(ARRIVAL_NAMES)}.")]
Rate = Annotated[float, typer.Option(help="poisson, gamma: requests a second.")]
Cv = Annotated[float, typer.Option(help="gamma: standard deviation of the gaps over their mean; 1 is poisson, above it bursty.")]
Clients = Annotated[int, typer.Option(help="closed: clients, each of which waits for its answer.")]
Think = Annotated[float, typer.Option("--think-s", help="closed: seconds between an answer and the next request.")]
Speed = Annotated[float, typer.Option(help="trace: how many times faster than it was recorded.")]
TtftObjective = Annotated[float | None, typer.Option("--ttft-ms", help="Objective for goodput; needs --itl-p99-ms too.")]
ItlObjective = Annotated[float | None, typer.Option("--itl-p99-ms", help="Objective for goodput: p99 of a request's own gaps.")]
TokenizerPath = Annotated[
    Path | None, typer.Option("--tokenizer", help="tokenizer.json, or the model's folder: counts the tokens of the answers again.", exists=True)
]
