"""`baton bench run`, `workload`, `summary` and `compare`."""

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from baton.bench import (
    ArrivalOptions,
    Asking,
    BenchError,
    Contestant,
    Limits,
    Objectives,
    Plan,
    WorkloadOptions,
    build_workload,
    compare_runs,
    comparison_markdown,
    load_counter,
    load_run,
    measure,
    open_target,
    summarise,
    summary_markdown,
)
from baton.bench.report import write_report
from baton.bench.request import Request
from baton.bench.targets import Api, ClientTls, Target
from baton.cli import bench_options as flags
from baton.cli import reaching as to
from baton.cli.errors import CliError, UsageError
from baton.cli.model.progress import ConsoleReporter

app = typer.Typer(help="Load generator: measure servers, sum up, compare.", no_args_is_help=True)
APIS = ("completions", "chat")
SHOWN_CHARS = 120

Targets = Annotated[list[str], typer.Option("--target", help="[NAME=]grpc://HOST:PORT or [NAME=]http://HOST:PORT/v1; several are measured in turns.")]
RunFile = Annotated[Path, typer.Argument(help="A .jsonl file that `baton bench run` wrote.", exists=True, dir_okay=False)]


@app.command()
def run(
    target: Targets,
    model: Annotated[str, typer.Option(help="The model's name at the server.")],
    out: Annotated[Path, typer.Option(help="Folder for NAME.jsonl, NAME.json and NAME.md of each target.")] = Path("bench-results"),
    api: Annotated[str, typer.Option(help="completions or chat; over gRPC these are Generate and Chat.")] = "completions",
    requests: Annotated[int, typer.Option(min=1, help="Requests a repeat.")] = 100,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before the first repeat that are not counted.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats, each with a seed of its own; 4 or more give ratios of percentiles.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="The longest that one request may take.")] = 600.0,
    max_in_flight: Annotated[int, typer.Option(help="Requests under way at once that an open loop may reach; any more fail unsent.")] = 4096,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of exact lengths (Baton, vLLM, SGLang; others may refuse the field).")] = True,
    workload: flags.WorkloadName = "chat",
    seed: flags.Seed = 0,
    file: flags.File = None,
    prompt_words: flags.PromptWords = None,
    answer_tokens: flags.AnswerTokens = None,
    document_words: flags.DocumentWords = None,
    document_share: flags.DocumentShare = None,
    sessions: flags.Sessions = None,
    turns: flags.Turns = None,
    shared_words: flags.SharedWords = None,
    length_scale: flags.LengthScale = None,
    arrivals: flags.ArrivalName = "poisson",
    rate: flags.Rate = 1.0,
    cv: flags.Cv = 2.0,
    clients: flags.Clients = 4,
    think_s: flags.Think = 0.0,
    speed: flags.Speed = 1.0,
    ttft_ms: flags.TtftObjective = None,
    itl_p99_ms: flags.ItlObjective = None,
    tokenizer: flags.TokenizerPath = None,
    api_key_file: to.ApiKeyFile = None,
    tls_ca_file: to.TlsCaFile = None,
    tls_cert_file: to.TlsCertFile = None,
    tls_key_file: to.TlsKeyFile = None,
) -> None:
    """Drives one or more servers with the same requests and writes raw samples and a summary of each. Exit status 1 if no request was answered."""
    with explained():
        options = WorkloadOptions(
            workload, seed, file, prompt_words, answer_tokens, document_words, document_share, sessions, turns, shared_words, length_scale
        )
        plan = Plan(
            options, ArrivalOptions(arrivals, rate, cv, clients, think_s, speed, seed), requests, warm_up, repeats, Limits(timeout_s, max_in_flight)
        )
        if api not in APIS:
            raise UsageError(f"--api is {api!r}, but must be one of {', '.join(APIS)}")
        objectives = objectives_of(ttft_ms, itl_p99_ms)
        found = to.reach(api_key_file, tls_ca_file, tls_cert_file, tls_key_file)
        paths = asyncio.run(_measure(plan, target, cast("Api", api), Asking(model, ignore_eos), found, out))
        summed = [_write_summary(path, objectives, tokenizer) for path in paths]
        if not any(summed):
            raise UsageError(f"no request was answered; causes are in {out}")


@app.command("workload")
def show_workload(
    show: Annotated[int, typer.Option(min=1, help="Requests to show.")] = 5,
    full: Annotated[bool, typer.Option(help="Whole requests as JSON lines instead of their beginnings.")] = False,
    workload: flags.WorkloadName = "chat",
    seed: flags.Seed = 0,
    file: flags.File = None,
    prompt_words: flags.PromptWords = None,
    answer_tokens: flags.AnswerTokens = None,
    document_words: flags.DocumentWords = None,
    document_share: flags.DocumentShare = None,
    sessions: flags.Sessions = None,
    turns: flags.Turns = None,
    shared_words: flags.SharedWords = None,
    length_scale: flags.LengthScale = None,
) -> None:
    """Prints the requests that a workload asks for; sends nothing."""
    with explained():
        options = WorkloadOptions(
            workload, seed, file, prompt_words, answer_tokens, document_words, document_share, sessions, turns, shared_words, length_scale
        )
        chosen = build_workload(options)
        num_shown = show if chosen.size is None else min(show, chosen.size)
        requests = [chosen.request(index) for index in range(num_shown)]
    if full:
        for request in requests:
            print(json.dumps(asdict(request)))
        return
    print(json.dumps(chosen.describe()))
    for request in requests:
        print(_line(request))


@app.command()
def summary(path: RunFile, ttft_ms: flags.TtftObjective = None, itl_p99_ms: flags.ItlObjective = None, tokenizer: flags.TokenizerPath = None) -> None:
    """Sums up a run again, with other objectives or a tokenizer, as Markdown."""
    with explained():
        print(summary_markdown(summarise(load_run(path), objectives_of(ttft_ms, itl_p99_ms), load_counter(tokenizer) if tokenizer else None)))


@app.command()
def compare(
    subject: RunFile,
    baseline: RunFile,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of Markdown.")] = False,
) -> None:
    """Ratios, with quartiles, of the first run over the second: request by request, and percentiles repeat by repeat."""
    with explained():
        found = compare_runs(load_run(subject), load_run(baseline))
    print(json.dumps(asdict(found)) if as_json else comparison_markdown(found))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="What `baton bench run` or `baton decide` wrote.", exists=True, file_okay=False)],
    out: Annotated[Path | None, typer.Option(help="Where report.html, report.md and report.json go; the same folder when not given.")] = None,
    ttft_ms: flags.TtftObjective = None,
    itl_p99_ms: flags.ItlObjective = None,
) -> None:
    """One HTML page with everything in it, and the same as Markdown and JSON."""
    with explained():
        for path in write_report(folder, out, objectives_of(ttft_ms, itl_p99_ms)):
            print(path)


@contextmanager
def explained() -> Iterator[None]:
    """What the bench refuses is one line to the user."""
    try:
        yield
    except (BenchError, OSError) as error:
        raise CliError(str(error)) from error


async def _measure(plan: Plan, targets: list[str], api: Api, asking: Asking, found: to.Reach, folder: Path) -> list[Path]:
    async with AsyncExitStack() as stack:
        contestants = []
        for name, url in map(_name_and_url, targets):
            target = reached(url, api, asking, found)
            stack.push_async_callback(target.aclose)
            contestants.append(Contestant(name, asking.model, target))
        gc.freeze()  # what is here to stay is not looked through while arrivals are being stamped
        return await measure(plan, contestants, folder, ConsoleReporter(Console(stderr=True)).step)


def reached(url: str, api: Api, asking: Asking, found: to.Reach) -> Target:
    """The key of the environment is Baton's own: over HTTP, where anybody may listen, only a key is shown that was named for it."""
    key = found.api_key if found.is_named or url.startswith("grpc://") else ""
    return open_target(url, api, asking, key, ClientTls(found.tls.ca_file, found.tls.cert_file, found.tls.key_file))


def _name_and_url(text: str) -> tuple[str, str]:
    """`target` is the name of a target without one."""
    name, equals, url = text.partition("=")
    if not equals or "://" in name:
        return "target", text
    if not name.replace("-", "").replace("_", "").isalnum():
        raise UsageError(f"the target's name is {name!r}, but must be of letters, digits, - and _: it names files")
    return name, url


def objectives_of(ttft_ms: float | None, itl_p99_ms: float | None) -> Objectives | None:
    """Both or none. Raises UsageError for one of them."""
    if ttft_ms is None and itl_p99_ms is None:
        return None
    if ttft_ms is None or itl_p99_ms is None:
        raise UsageError("only one objective was given, but goodput needs both --ttft-ms and --itl-p99-ms")
    return Objectives(ttft_ms, itl_p99_ms)


def _write_summary(path: Path, objectives: Objectives | None, tokenizer: Path | None) -> bool:
    """Whether any request was answered."""
    found = summarise(load_run(path), objectives, load_counter(tokenizer) if tokenizer else None)
    text = summary_markdown(found)
    path.with_suffix(".json").write_text(json.dumps(asdict(found), indent=1) + "\n")
    path.with_suffix(".md").write_text(text)
    print(text)
    return found.num_failed < found.num_requests


def _line(request: Request) -> str:
    long = ", long" if request.is_long else ""
    at = "" if request.arrival_s is None else f", at {request.arrival_s:g} s"
    content = request.messages[-1].content
    shown = content if len(content) <= SHOWN_CHARS else content[:SHOWN_CHARS] + "..."
    lengths = f"{request.num_prompt_words} words in {len(request.messages)} messages, {request.max_tokens} tokens"
    return f"{request.index}: {request.kind}, {lengths}{long}{at}: {shown}"
