"""What the split costs a single request: its TTFT against a plain server's, through real gateways, in turns, the machine otherwise idle.

    python benchmarks/split_ttft.py --prompts 16,256,1024 --rounds 15

Prints medians and ratios, and exits with 1 if a ratio is above the target. Both answers of a pair must be equal token for token.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from baton.bench import Comparison, RequestTiming, ServingClient, compare
from baton.cli.fleet import FleetOptions, Topology, Transport, start_fleet
from baton.cli.services import Supervisor
from baton.cli.up import resolve_model

TARGET_RATIO = 1.15
NUM_TOKENS = 8
WARM_UP_ROUNDS = 2
SMALLEST_ID, LARGEST_ID = 100, 40_000
DRAIN_TIMEOUT_S = 10.0


async def measure(split: ServingClient, plain: ServingClient, prompt_len: int, num_rounds: int) -> tuple[list[RequestTiming], list[RequestTiming]]:
    """One pair a round, each pair with a prompt of its own; who goes first alternates."""
    draw = random.Random(prompt_len)
    split_timings, plain_timings = [], []
    for turn in range(WARM_UP_ROUNDS + num_rounds):
        prompt = [draw.randint(SMALLEST_ID, LARGEST_ID) for _ in range(prompt_len)]
        order = (split, plain) if turn % 2 else (plain, split)
        found = {client: await client.generate(prompt, NUM_TOKENS) for client in order}
        if found[split].token_ids != found[plain].token_ids:
            raise SystemExit(f"the answers differ: {found[split].token_ids} and {found[plain].token_ids}")
        if turn >= WARM_UP_ROUNDS:
            split_timings.append(found[split])
            plain_timings.append(found[plain])
    return split_timings, plain_timings


def show(prompt_len: int, split: Sequence[RequestTiming], ttft: Comparison) -> None:
    moved = split[-1].report.transfer
    exposed_ms = sorted(timing.report.transfer.exposed_ms for timing in split)[len(split) // 2]
    print(
        f"{prompt_len:>7} tokens: TTFT split {ttft.subject:8.2f} ms, plain {ttft.baseline:8.2f} ms, ratio {ttft.ratio:.3f} "
        f"(quartiles {ttft.ratio_low:.3f} to {ttft.ratio_high:.3f}, {ttft.num_pairs} pairs); "
        f"{moved.bytes / 2**20:.1f} MiB in {moved.puts} puts over {moved.transport}, {exposed_ms:.2f} ms of it after the last layer"
    )


async def run(addresses: dict[Topology, str], model: str, prompt_lens: Sequence[int], num_rounds: int) -> bool:
    split, plain = ServingClient(addresses[Topology.SPLIT], model), ServingClient(addresses[Topology.PLAIN], model)
    good = True
    try:
        for prompt_len in prompt_lens:
            split_timings, plain_timings = await measure(split, plain, prompt_len, num_rounds)
            ttft = compare([timing.ttft_ms for timing in split_timings], [timing.ttft_ms for timing in plain_timings])
            show(prompt_len, split_timings, ttft)
            good = good and ttft.ratio <= TARGET_RATIO
    finally:
        await split.aclose()
        await plain.aclose()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name of `baton model list`, or a Hugging Face folder")
    parser.add_argument("--prompts", default="16,256,1024", help="prompt lengths in tokens, comma separated")
    parser.add_argument("--rounds", type=int, default=15, help="measured pairs for each length")
    parser.add_argument("--transport", default="auto", choices=[transport.value for transport in Transport])
    arguments = parser.parse_args()
    model_path, model_name = resolve_model(arguments.model)
    addresses = {}
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        for topology in Topology:
            supervisor = stack.enter_context(Supervisor(run_dir / topology.value, DRAIN_TIMEOUT_S))
            transport = Transport(arguments.transport)
            options = FleetOptions(model_path, model_name, topology=topology, transport=transport, http_port=0, grpc_port=0, bootstrap_port=0)
            addresses[topology] = start_fleet(options, supervisor, lambda text: None).grpc
        good = asyncio.run(run(addresses, model_name, [int(text) for text in arguments.prompts.split(",")], arguments.rounds))
    print(f"target: at most {TARGET_RATIO:.2f} x plain: {'met' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
