"""What landing transfers cost the streams that decode is running: steady streams, with long prompts arriving beside them and without.

    python benchmarks/gpu/landing.py --model benchmarks/gpu/qwen3-8b --device cuda:0 --decode-device cuda:1

Dummy weights. Prefill has --device, decode --decode-device, so that only the transfers and the rooms that they open touch decode. Windows with
and without injected prompts take turns; each counts the tokens that the steady streams received. An injected prompt's own two tokens are one
decode step more for one row: no prompt is computed on decode. Target: at least 0.97 of the throughput without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time

from served import arguments, serving

from baton.bench import ServingClient, compare

TARGET = 0.97
STREAM_PROMPT = 2048


class Streams:
    """Steady streams of one gateway; `count` is what they have received."""

    def __init__(self, client: ServingClient, num_streams: int, draw: random.Random, limit: int) -> None:
        self.count = 0
        prompts = [[draw.randrange(2, 100_000) for _ in range(STREAM_PROMPT)] for _ in range(num_streams)]
        self._tasks = [asyncio.create_task(self._run(client, prompt, limit)) for prompt in prompts]

    async def _run(self, client: ServingClient, prompt: list[int], limit: int) -> None:
        async for _ in client.tokens(prompt, limit):
            self.count += 1

    async def rate(self, seconds: float) -> float:
        """Tokens a second over the next `seconds`. Raises what a stream raised; a stream that ended makes the rate worthless: RuntimeError."""
        before, begun = self.count, time.perf_counter()
        await asyncio.sleep(seconds)
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("a steady stream ended while it was measured: give --kv-bytes and --max-model-len room for more tokens")
        return (self.count - before) / (time.perf_counter() - begun)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def inject(client: ServingClient, length: int, draw: random.Random, moved: list[int]) -> None:
    """One long prompt after another, until cancelled."""
    while True:
        timing = await client.generate([draw.randrange(2, 100_000) for _ in range(length)], 2)
        moved.append(timing.report.transfer.bytes)


async def measure(address: str, model: str, given: argparse.Namespace) -> dict:
    draw, client = random.Random(1), ServingClient(address, model)
    alone: list[float] = []
    beside: list[float] = []
    moved: list[int] = []
    streams = Streams(client, given.streams, draw, given.stream_tokens)
    try:
        while streams.count < given.streams * 8:
            await streams.rate(0.05)
        for _ in range(given.rounds):
            alone.append(await streams.rate(given.window_s))
            injector = asyncio.create_task(inject(client, given.prompt, draw, moved))
            beside.append(await streams.rate(given.window_s))
            if injector.done():
                injector.result()
            injector.cancel()
            await asyncio.gather(injector, return_exceptions=True)
            await asyncio.sleep(given.window_s / 2)  # what was cancelled has ended
    finally:
        await streams.end()
        await client.aclose()
    if not moved:
        raise RuntimeError(f"no prompt of {given.prompt} tokens landed within {given.window_s} s: give --window-s more")
    ratio = compare(beside, alone)
    return {
        "streams": given.streams, "tokens_s": ratio.subject, "alone_tokens_s": ratio.baseline, "ratio": ratio.ratio, "ratio_low": ratio.ratio_low,
        "prompts": len(moved), "bytes": sum(moved), "transfer_gb_s": sum(moved) / 1e9 / (given.rounds * given.window_s),
    }  # fmt: skip


def main() -> int:
    parser = arguments(__doc__, kv_bytes=24 << 30)
    parser.add_argument("--decode-device", default="cuda:1")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--stream-tokens", type=int, default=12_000)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of an injected prompt")
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--digest", choices=("off", "sample", "all"), default="off")
    given = parser.parse_args()
    with serving(given) as served:
        flags = served.worker_flags(
            kv_bytes=given.kv_bytes, max_running=given.streams + 4, max_batched_tokens=max(given.prompt, STREAM_PROMPT),
            max_model_len=max(given.prompt + 8, STREAM_PROMPT + given.stream_tokens),
        )  # fmt: skip
        _, start = served.fleet("split", digest=given.digest, worker_flags=flags, decode_flags=(f"--device={given.decode_device}",))
        found = asyncio.run(measure(start().grpc, served.model.name, given))
    good = found["ratio"] >= TARGET
    print(
        f"{found['streams']} streams, prefill on {given.device}, decode on {given.decode_device}: {found['tokens_s']:.0f} tokens/s while "
        f"{found['prompts']} prompts of {given.prompt} landed ({found['transfer_gb_s']:.2f} GB/s on average), {found['alone_tokens_s']:.0f} alone; "
        f"ratio {found['ratio']:.3f} (lower quartile {found['ratio_low']:.3f}), target {TARGET}: {'met' if good else 'MISSED'}"
    )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
