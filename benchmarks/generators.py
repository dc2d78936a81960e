"""Our load generator beside another public one, LLMeter, against the same server over HTTP: the same closed loop, in turns.

    python -m venv peer && peer/bin/pip install --upgrade pip && peer/bin/pip install 'llmeter[openai]'
    python benchmarks/generators.py --peer-python peer/bin/python

Compared are the medians of TTFT and of the time to the last token, and output tokens a second; each ratio must be within 5 % of 1. Every round
asks for new prompts of equal length, so that no prefix cache answers. Exit status 1 if they disagree.

`--scheduled` asks a server that only sleeps instead of one with a model: what it does is known, and other work on the machine disturbs less.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from scheduled_server import FIRST_S, GAP_S

from baton.bench import Asking, Limits, compare, open_target
from baton.bench.arrivals import ClosedLoop
from baton.bench.generator import Generator
from baton.bench.request import Message, Request
from baton.bench.text import generator, plain_text
from baton.cli.demo import watched
from baton.cli.fleet import FleetOptions, Topology
from baton.cli.model.progress import ConsoleReporter
from baton.cli.up import resolve_model, running_fleet

TOLERANCE = 0.05
PEER = Path(__file__).with_name("generators_peer.py")
SLEEPER = Path(__file__).with_name("scheduled_server.py")
FIGURES = ("TTFT ms", "time to last token ms", "output tokens/s")
Figures = dict[str, float]
#: When it was sent, TTFT, time to last token (seconds), output tokens.
Row = tuple[float, float, float, int]


def prompts(seed: int, num: int, num_words: int) -> list[str]:
    return [f"Part {seed}. {plain_text(generator(seed, index), num_words)}" for index in range(num)]


def figures(rows: Sequence[Row]) -> Figures:
    """The rate is over the time from the first sending to the last token: what a generator does before and after is not the server's."""
    span_s = max(sent_s + last_s for sent_s, _, last_s, _ in rows) - min(sent_s for sent_s, *_ in rows)
    values = (1000 * median(row[1] for row in rows), 1000 * median(row[2] for row in rows), sum(row[3] for row in rows) / span_s)
    return dict(zip(FIGURES, values, strict=True))


async def ours(base_url: str, model: str, texts: Sequence[str], clients: int, max_tokens: int) -> Figures:
    target = open_target(base_url, "chat", Asking(model))
    try:
        requests = [Request(index, "chat", (Message("user", text),), max_tokens, is_long=False) for index, text in enumerate(texts)]
        measured = await Generator(target, Limits(), 0, is_warm_up=False, on_done=lambda _: None).run(requests, ClosedLoop(clients))
    finally:
        await target.aclose()
    if failed := [sample for sample in measured.samples if sample.error is not None]:
        raise SystemExit(f"{len(failed)} of {len(texts)} requests failed, first: {failed[0].error}: {failed[0].error_detail}")
    return figures([(at.sent_s, at.token_s[0] - at.sent_s, at.token_s[-1] - at.sent_s, at.num_tokens) for at in measured.samples])


async def theirs(python: str, base_url: str, model: str, texts: Sequence[str], clients: int, max_tokens: int) -> tuple[Figures, str]:
    asked = {"base_url": base_url, "model": model, "max_tokens": max_tokens, "clients": [list(texts[first::clients]) for first in range(clients)]}
    child = await asyncio.create_subprocess_exec(python, str(PEER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, complaints = await child.communicate(json.dumps(asked).encode())
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise SystemExit(f"LLMeter failed: {complaints.decode(errors='replace')[-2000:]}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return figures([tuple(row) for row in found["requests"]]), found["version"]


async def run(arguments: argparse.Namespace, base_url: str, model: str, reporter: ConsoleReporter) -> bool:
    found: dict[str, list[Figures]] = {"ours": [], "theirs": []}
    version = ""
    with reporter.step("rounds", arguments.rounds + 1) as step:
        for turn in range(arguments.rounds + 1):
            for place, who in enumerate(("ours", "theirs") if turn % 2 == 0 else ("theirs", "ours")):
                texts = prompts(2 * turn + place, arguments.clients * arguments.requests, arguments.prompt_words)
                if who == "ours":
                    values = await ours(base_url, model, texts, arguments.clients, arguments.answer_tokens)
                else:
                    values, version = await theirs(arguments.peer_python, base_url, model, texts, arguments.clients, arguments.answer_tokens)
                if turn:  # the first round warms up
                    found[who].append(values)
            step(turn + 1)
    print(f"LLMeter {version}, {arguments.clients} clients, {arguments.requests} requests each, {arguments.rounds} rounds in turns")
    good = True
    for name in FIGURES:
        both = compare([values[name] for values in found["ours"]], [values[name] for values in found["theirs"]])
        agrees = abs(both.ratio - 1) <= TOLERANCE
        good = good and agrees
        ratio = f"ratio {both.ratio:.3f} (quartiles {both.ratio_low:.3f} to {both.ratio_high:.3f})"
        print(f"{name:<22} ours {both.subject:9.2f}, LLMeter {both.baseline:9.2f}, {ratio}: {'agree' if agrees else 'DISAGREE'}")
    if arguments.scheduled:
        print("by the server's schedule: " + ", ".join(f"{name} {value:.2f}" for name, value in known(arguments).items()))
    return good


def known(arguments: argparse.Namespace) -> Figures:
    """What a generator without any time of its own would measure of the server that sleeps."""
    last_s = FIRST_S + (arguments.answer_tokens - 1) * GAP_S
    return dict(zip(FIGURES, (1000 * FIRST_S, 1000 * last_s, arguments.clients * arguments.answer_tokens / last_s), strict=True))


@contextmanager
def scheduled() -> Iterator[str]:
    """The address of a server of its own process that only sleeps."""
    with subprocess.Popen((sys.executable, str(SLEEPER)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        yield child.stdout.readline().strip()
        child.stdin.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="an interpreter that has LLMeter")
    parser.add_argument("--model", default="smollm2", help="a name of `baton model list`, or a Hugging Face folder")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=6, help="at least 4")
    parser.add_argument("--prompt-words", type=int, default=24)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--scheduled", action="store_true", help="a server that only sleeps, instead of a model")
    parser.add_argument("--worker-flag", action="append", default=[], help="handed to the server of the model")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if arguments.scheduled:
        with scheduled() as base_url:
            return told(asyncio.run(run(arguments, base_url, "none", ConsoleReporter(console))))
    model_path, model_name = resolve_model(arguments.model)
    flags = tuple(arguments.worker_flag)
    options = FleetOptions(model_path, model_name, topology=Topology.PLAIN, http_port=0, grpc_port=0, bootstrap_port=0, worker_flags=flags)
    with running_fleet(options, drain_timeout_s=20.0, console=console, verbose=False) as fleet:
        base_url = f"http://{fleet.addresses.http}/v1"
        good = asyncio.run(watched(fleet.supervisor, run(arguments, base_url, model_name, ConsoleReporter(console))))
    return told(good)


def told(good: bool) -> int:
    print(f"target: within {100 * TOLERANCE:g} %: {'met' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
