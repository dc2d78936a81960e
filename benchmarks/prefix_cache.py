"""What prefix caches spare a chat: five turns behind a long system prompt, through two real split fleets, one with caches and one without, in turns.

    python benchmarks/prefix_cache.py --system 2000 --rounds 3

Prints what each turn moved and its TTFT side by side, and exits with 1 if the last turn's is above the target, or if an answer differs.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from baton.bench import RequestTiming, ServingClient
from baton.cli.fleet import FleetOptions, start_fleet
from baton.cli.services import Supervisor
from baton.cli.up import resolve_model

TARGET_RATIO = 0.4
NUM_TURNS = 5
USER_TOKENS, ANSWER_TOKENS = 24, 16
SMALLEST_ID, LARGEST_ID = 100, 40_000
DRAIN_TIMEOUT_S = 10.0
WAYS = {"without": ("--no-prefix-cache",), "with": ("--prefix-cache",)}


@dataclass
class Turn:
    """One turn of one round on both fleets."""

    prompt_tokens: int
    with_cache: RequestTiming
    without: RequestTiming


async def chat(clients: dict[str, ServingClient], system_tokens: int, number: int) -> list[Turn]:
    """A conversation that nobody had before. Who goes first alternates."""
    draw = random.Random(number)

    def text(count: int) -> list[int]:
        return [draw.randint(SMALLEST_ID, LARGEST_ID) for _ in range(count)]

    history, turns = text(system_tokens), []
    for turn in range(NUM_TURNS):
        history = [*history, *text(USER_TOKENS)]
        order = list(WAYS) if (turn + number) % 2 else list(WAYS)[::-1]
        found = {way: await clients[way].generate(history, ANSWER_TOKENS) for way in order}
        if found["with"].token_ids != found["without"].token_ids:
            raise SystemExit(f"turn {turn + 1}: the answers differ: {found['with'].token_ids} and {found['without'].token_ids}")
        turns.append(Turn(len(history), found["with"], found["without"]))
        history = [*history, *found["with"].token_ids]
    return turns


def show(rounds: list[list[Turn]]) -> float:
    """Prints a line a turn; returns the last one's ratio, the median over the rounds."""
    print(f"{'turn':>4} {'prompt':>7}   {'TTFT with':>10} {'without':>9} {'ratio':>6}   {'moved with':>10} {'without':>9}")
    ratio = 0.0
    for index in range(NUM_TURNS):
        turns = [each[index] for each in rounds]
        ratio = statistics.median(turn.with_cache.ttft_ms / turn.without.ttft_ms for turn in turns)
        ttft = [statistics.median(getattr(turn, way).ttft_ms for turn in turns) for way in ("with_cache", "without")]
        moved = [getattr(turns[0], way).report.transfer.bytes / 2**20 for way in ("with_cache", "without")]
        print(
            f"{index + 1:>4} {turns[0].prompt_tokens:>7}   {ttft[0]:>7.0f} ms {ttft[1]:>6.0f} ms {ratio:>6.3f}   "
            f"{moved[0]:>6.1f} MiB {moved[1]:>5.1f} MiB"
        )
    return ratio


async def run(addresses: dict[str, str], model: str, system_tokens: int, num_rounds: int) -> float:
    clients = {way: ServingClient(address, model) for way, address in addresses.items()}
    try:
        await chat(clients, 64, number=0)  # warms both up
        return show([await chat(clients, system_tokens, number) for number in range(1, num_rounds + 1)])
    finally:
        for client in clients.values():
            await client.aclose()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name of `baton model list`, or a Hugging Face folder")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--rounds", type=int, default=3, help="conversations")
    arguments = parser.parse_args()
    model_path, model_name = resolve_model(arguments.model)
    addresses = {}
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        for way, flags in WAYS.items():
            supervisor = stack.enter_context(Supervisor(run_dir / way, DRAIN_TIMEOUT_S))
            options = FleetOptions(model_path, model_name, http_port=0, grpc_port=0, bootstrap_port=0, digest="all", worker_flags=flags)
            addresses[way] = start_fleet(options, supervisor, lambda text: None).grpc
        ratio = asyncio.run(run(addresses, model_name, arguments.system, arguments.rounds))
    good = ratio <= TARGET_RATIO
    print(f"target: the last turn's TTFT at most {TARGET_RATIO:.2f} x that without caches: {'met' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
