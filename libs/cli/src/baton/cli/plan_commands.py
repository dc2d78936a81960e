"""`baton plan calibrate`, `fit`, `predict` and `size`: what fleets that are not here would do."""

import asyncio
import gc
import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.bench import ArrivalOptions, Asking, Contestant, WorkloadOptions, build_workload, load_run
from baton.bench.arrivals import build_arrivals
from baton.bench.errors import SettingError
from baton.bench.measures import Objectives
from baton.bench.plan import (
    Calibration,
    Demand,
    Effort,
    FleetShape,
    Lengths,
    Link,
    Load,
    ServerLimits,
    Sized,
    Sizer,
    calibrate,
    calibration_markdown,
    drawn,
    from_decide,
    from_runs,
    load_calibration,
    measure_stages,
    predict,
    predictions_markdown,
    save_calibration,
    sized_markdown,
)
from baton.bench.runfile import Run
from baton.cli import bench_options as flags
from baton.cli import reaching as to
from baton.cli.bench_commands import explained, objectives_of, reached
from baton.cli.errors import UsageError
from baton.cli.model.progress import ConsoleReporter

app = typer.Typer(help="Predict fleets that are not here, from what a few servers here measured.", no_args_is_help=True)

GBIT = 1e9 / 8
RATIO = re.compile(r"(?P<prefill>\d+):(?P<decode>\d+)|(?P<plain>\d+)")

CalibrationFile = Annotated[Path, typer.Argument(help="A file that `baton plan fit` or `calibrate` wrote.", exists=True, dir_okay=False)]
Out = Annotated[Path, typer.Option(help="Where the calibration goes.")]
Seeds = Annotated[int, typer.Option(min=1, help="Simulations of everything, each with costs from another resample of the measured points.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of Markdown.")]
LinkGbit = Annotated[float | None, typer.Option(help="Gbit/s of a server's link, instead of the measured one.")]
LinkLatency = Annotated[float | None, typer.Option("--link-latency-ms", help="From the last byte until decode knows, instead of the measured one.")]
MaxBatched = Annotated[int, typer.Option(help="Servers' --max-batched-tokens.")]
MixedPrompt = Annotated[int | None, typer.Option(help="Plain servers' --mixed-prompt-tokens; not limited when not given.")]
MaxRunning = Annotated[int, typer.Option(help="Servers' --max-running.")]
PoolTokens = Annotated[int | None, typer.Option(help="Tokens that a server's KV pool holds; endless when not given.")]
Routing = Annotated[str, typer.Option(help="least-load or round-robin.")]


@app.command("calibrate")
def calibrate_live(
    plain: Annotated[str, typer.Option(help="grpc://HOST:PORT of a gateway with one plain server, otherwise idle.")],
    model: Annotated[str, typer.Option(help="The model's name at the servers.")],
    split: Annotated[str | None, typer.Option(help="grpc://HOST:PORT of a gateway with one prefill and one decode server.")] = None,
    out: Out = Path("calibration.json"),
    samples: Annotated[Path, typer.Option(help="Folder for the raw samples; must not hold earlier ones.")] = Path("calibration-samples"),
    longest_words: Annotated[int, typer.Option(help="Words of the longest prompt; longer ones are extrapolated.")] = 512,
    most_rows: Annotated[int, typer.Option(help="Most streams at a time.")] = 8,
    requests: Annotated[int, typer.Option(help="Requests of each point.")] = 6,
    max_batched_tokens: MaxBatched = 1024,
    mixed_prompt_tokens: MixedPrompt = None,
    seed: flags.Seed = 0,
    api_key_file: to.ApiKeyFile = None,
    tls_ca_file: to.TlsCaFile = None,
    tls_cert_file: to.TlsCertFile = None,
    tls_key_file: to.TlsKeyFile = None,
) -> None:
    """Measures one plain server (and a pair) step by step: prompts alone, rows alone, both together; fits what they cost."""
    with explained():
        limits = ServerLimits(max_batched_tokens=max_batched_tokens, mixed_prompt_tokens=mixed_prompt_tokens)
        effort = Effort(longest_words, most_rows, requests)
        urls = {"plain": plain} | ({} if split is None else {"split": split})
        found = to.reach(api_key_file, tls_ca_file, tls_cert_file, tls_key_file)
        runs = asyncio.run(_measured(urls, model, found, samples, effort, seed))
        _write(calibrate(from_runs(runs["plain"], runs.get("split", ()), limits, f"{', '.join(urls.values())}, samples in {samples.name}")), out)


@app.command("fit")
def fit_runs(
    runs: Annotated[list[Path], typer.Argument(help="A decide run's folder, or run files of one plain server.", exists=True)],
    split: Annotated[
        list[Path] | None, typer.Option(help="Run files of one prefill and one decode server (not with a decide run).", exists=True, dir_okay=False)
    ] = None,
    out: Out = Path("calibration.json"),
    max_batched_tokens: MaxBatched = 1024,
    mixed_prompt_tokens: MixedPrompt = None,
) -> None:
    """Fits costs to what was measured before."""
    with explained():
        limits = ServerLimits(max_batched_tokens=max_batched_tokens, mixed_prompt_tokens=mixed_prompt_tokens)
        if len(runs) == 1 and runs[0].is_dir():
            if split:
                raise UsageError("--split was given beside a decide run, which has its own split")
            measured = from_decide(runs[0], limits)
        else:
            names = ", ".join(path.name for path in (*runs, *(split or ())))
            measured = from_runs([load_run(path) for path in runs], [load_run(path) for path in split or ()], limits, names)
        _write(calibrate(measured), out)


@app.command("predict")
def predict_fleets(
    calibration: CalibrationFile,
    servers: Annotated[list[str], typer.Option("--servers", help="A number of plain servers, or PREFILL:DECODE; again and again.")],
    requests: Annotated[int, typer.Option(min=10, help="Simulated requests of each seed.")] = 3000,
    seeds: Seeds = 5,
    link_gbit: LinkGbit = None,
    link_latency_ms: LinkLatency = None,
    max_batched_tokens: MaxBatched = 1024,
    mixed_prompt_tokens: MixedPrompt = None,
    max_running: MaxRunning = 64,
    pool_tokens: PoolTokens = None,
    routing: Routing = "least-load",
    per_host: Annotated[int, typer.Option(min=1, help="Servers that share a host and slow each other as measured; 1: each has its own.")] = 1,
    workload: flags.WorkloadName = "chat",
    seed: flags.Seed = 0,
    file: flags.File = None,
    prompt_words: flags.PromptWords = None,
    answer_tokens: flags.AnswerTokens = None,
    document_words: flags.DocumentWords = None,
    document_share: flags.DocumentShare = None,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma or closed.")] = "poisson",
    rate: flags.Rate = 1.0,
    cv: flags.Cv = 2.0,
    clients: flags.Clients = 4,
    ttft_ms: flags.TtftObjective = None,
    itl_p99_ms: flags.ItlObjective = None,
    as_json: AsJson = False,
) -> None:
    """TTFT, ITL and goodput of fleets under a load, with error bars."""
    with explained():
        found = load_calibration(calibration)
        link = _link(link_gbit, link_latency_ms)
        limits = _limits(max_batched_tokens, mixed_prompt_tokens, max_running, pool_tokens)
        shapes = [_shape(text, limits, routing, per_host) for text in servers]
        asked = WorkloadOptions(workload, seed, file, prompt_words, answer_tokens, document_words, document_share)
        lengths = Lengths.of_workload(build_workload(asked), found.tokens_per_word, found.template_tokens)
        options = ArrivalOptions(arrivals, rate, cv, clients, seed=seed)
        objectives = objectives_of(ttft_ms, itl_p99_ms)
        predictions = []
        for shape in shapes:
            with ConsoleReporter(Console(stderr=True)).step(shape.name, seeds) as step:
                over = link if shape.is_split else None
                loads = _loads(lengths, options, requests)
                predictions.append(predict(found, shape, loads, seeds, objectives, over, step=step))
    if as_json:
        print(json.dumps([asdict(one) for one in predictions]))
    else:
        print(predictions_markdown(predictions, found, _described(asked, options)))


@app.command("size")
def size_fleet(
    calibration: CalibrationFile,
    rate: Annotated[float, typer.Option(help="Requests a second of the whole fleet.")],
    ttft_ms: Annotated[float, typer.Option(help="Objective: time to the first token.")],
    itl_p99_ms: Annotated[float, typer.Option(help="Objective: p99 of a request's own gaps.")],
    attainment: Annotated[float, typer.Option(help="Part of the requests that must meet both.")] = 0.99,
    kinds: Annotated[str, typer.Option(help="plain, split, or both, separated by a comma.")] = "plain,split",
    seeds: Seeds = 5,
    link_gbit: LinkGbit = None,
    link_latency_ms: LinkLatency = None,
    max_batched_tokens: MaxBatched = 1024,
    mixed_prompt_tokens: MixedPrompt = None,
    max_running: MaxRunning = 64,
    pool_tokens: PoolTokens = None,
    routing: Routing = "least-load",
    workload: flags.WorkloadName = "chat",
    seed: flags.Seed = 0,
    file: flags.File = None,
    prompt_words: flags.PromptWords = None,
    answer_tokens: flags.AnswerTokens = None,
    document_words: flags.DocumentWords = None,
    document_share: flags.DocumentShare = None,
    arrivals: Annotated[str, typer.Option(help="poisson or gamma.")] = "poisson",
    cv: flags.Cv = 2.0,
    as_json: AsJson = False,
) -> None:
    """How many servers of each kind a load and its objectives need, with error bars. Exit status 1 if no kind meets them."""
    with explained():
        found = load_calibration(calibration)
        wanted = [kind.strip() for kind in kinds.split(",")]
        if not wanted or not set(wanted) <= {"plain", "split"}:
            raise UsageError(f"--kinds is {kinds!r}, but must be plain, split, or both")
        base = _shape("1", _limits(max_batched_tokens, mixed_prompt_tokens, max_running, pool_tokens), routing, 1)
        asked = WorkloadOptions(workload, seed, file, prompt_words, answer_tokens, document_words, document_share)
        lengths = Lengths.of_workload(build_workload(asked), found.tokens_per_word, found.template_tokens)
        demand = Demand(lengths, ArrivalOptions(arrivals, rate, cv, seed=seed), Objectives(ttft_ms, itl_p99_ms), attainment)
        sizer = Sizer(found, base, demand, _link(link_gbit, link_latency_ms))
        sized, refused = _sized(sizer, wanted, seeds)
    if as_json:
        print(json.dumps({"sized": [asdict(one) for one in sized], "refused": refused}))
    else:
        print(sized_markdown(sized, refused, demand, found))
    if not sized:
        raise typer.Exit(1)


def _sized(sizer: Sizer, kinds: list[str], seeds: int) -> tuple[list[Sized], list[str]]:
    reporter = ConsoleReporter(Console(stderr=True))
    sized, refused = [], []
    for kind in kinds:
        try:
            sized.append(sizer.size(is_split=kind == "split", num_seeds=seeds, note=reporter.note))
        except SettingError as error:
            refused.append(f"**{kind}**: {error}")
    return sized, refused


async def _measured(urls: dict[str, str], model: str, found: to.Reach, folder: Path, effort: Effort, seed: int) -> dict[str, list[Run]]:
    async with AsyncExitStack() as stack:
        contestants = []
        for name, url in urls.items():
            target = reached(url, "completions", Asking(model), found)
            stack.push_async_callback(target.aclose)
            contestants.append(Contestant(name, model, target))
        gc.freeze()  # what is here to stay is not looked through while arrivals are being stamped
        return await measure_stages(contestants, folder, effort, seed, ConsoleReporter(Console(stderr=True)).step)


def _write(found: Calibration, out: Path) -> None:
    save_calibration(found, out)
    print(calibration_markdown(found))
    print(f"\nwritten to {out}")


def _loads(lengths: Lengths, options: ArrivalOptions, num_requests: int) -> Callable[[int], Load]:
    return lambda seed: drawn(lengths, options, num_requests, seed)


def _limits(max_batched: int, mixed: int | None, max_running: int, pool_tokens: int | None) -> ServerLimits:
    base = ServerLimits()
    num_pages = base.num_pages if pool_tokens is None else max(1, pool_tokens // base.page_size)
    return ServerLimits(num_pages=num_pages, max_batched_tokens=max_batched, mixed_prompt_tokens=mixed, max_running=max_running)


def _shape(text: str, limits: ServerLimits, routing: str, per_host: int) -> FleetShape:
    found = RATIO.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--servers is {text!r}, but must be a number of plain servers, or PREFILL:DECODE")
    plain, prefill, decode = (int(found[name] or 0) for name in ("plain", "prefill", "decode"))
    return FleetShape(plain, prefill, decode, limits, routing, per_host)


def _link(gbit: float | None, latency_ms: float | None) -> Link:
    return Link(None if gbit is None else gbit * GBIT, None if latency_ms is None else latency_ms / 1e3)


def _described(asked: WorkloadOptions, arrivals: ArrivalOptions) -> str:
    return f"Workload {json.dumps(build_workload(asked).describe())}; arrivals {build_arrivals(arrivals, ()).describe()}"
