"""What the host does of a decode step in the real decode server, as the server itself measures it, and how long the GPU stands still between steps.

    python benchmarks/gpu/decode_host.py --model benchmarks/gpu/qwen3-8b

Gateway, prefill and decode as processes of their own on one GPU, dummy weights; --streams clients decode through the gateway, and the decode server's
metrics are scraped before and after a window in which nothing else runs. Printed of each part of a step, in ms: mean (exact), median and 99th
percentile (within the histogram's buckets). admit: commands and landed rooms; schedule: the plan; launch: seats, pages and the graph; commit:
tokens read become events and counts; deliver: events to the front's thread; reply: that thread's processor time from batch to batch, reports made,
serialised and written. Targets: schedule, admit, commit, deliver and reply together under 1 ms, the GPU idle for under 3 % of a step. What launching
the step takes, beside which the device works on the one before, is printed beside, and so is the wait for the device. Exits with 1 where a target is
missed, or a step was not a replayed graph.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import urllib.request
from itertools import pairwise

from landing import STREAM_PROMPT, Streams
from prometheus_client.parser import text_string_to_metric_families
from served import arguments, serving

from baton.bench import ServingClient
from baton.cli.services import Supervisor

SUM_TARGET_MS, IDLE_TARGET = 1.0, 0.03
COUNTED = ("admit", "schedule", "commit", "deliver", "reply")
BESIDE = ("launch", "wait")

#: Samples by name and labels, "le" among them.
Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(address: str) -> Scrape:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(sample.name, frozenset(sample.labels.items())): sample.value for family in families for sample in family.samples}


def running(found: Scrape) -> float:
    return sum(value for (name, said), value in found.items() if name == "baton_queue_length" and ("queue", "running") in said)


def metrics_address(supervisor: Supervisor) -> str:
    record = next(service for service in supervisor.services if service.name == "decode-0").ready()
    assert record is not None
    return record.addresses["metrics"]


class Window:
    """What was counted between two scrapes."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._delta = {key: value - before.get(key, 0.0) for key, value in after.items()}

    def total(self, name: str, **labels: str) -> float:
        return sum(value for (found, said), value in self._delta.items() if found == name and set(labels.items()) <= said)

    def mean(self, name: str, **labels: str) -> float:
        return self.total(f"{name}_sum", **labels) / max(1.0, self.total(f"{name}_count", **labels))

    def quantile(self, name: str, share: float, **labels: str) -> float:
        """Linear within the bucket; of the last one its lower bound."""
        bounds = [
            (float(dict(said)["le"]), value)
            for (found, said), value in self._delta.items()
            if found == f"{name}_bucket" and set(labels.items()) <= said
        ]
        marks = [(0.0, 0.0), *sorted(bounds)]
        wanted = share * marks[-1][1]
        for (low, below), (high, upto) in pairwise(marks):
            if upto >= wanted and upto > below:
                return low if high == float("inf") else low + (high - low) * (wanted - below) / (upto - below)
        return 0.0


async def drive(address: str, metrics: str, model: str, given: argparse.Namespace) -> Window:
    client = ServingClient(address, model)
    streams = Streams(client, given.streams, random.Random(1), given.stream_tokens)
    try:
        while running(await asyncio.to_thread(scrape, metrics)) < given.streams:
            await streams.rate(0.1)
        # All decode now, and all of them for the whole window: the rate is refused where one ended.
        await streams.rate(given.settle_s)
        before = await asyncio.to_thread(scrape, metrics)
        await streams.rate(given.window_s)
        return Window(before, await asyncio.to_thread(scrape, metrics))
    finally:
        await streams.end()
        await client.aclose()


def told(window: Window, given: argparse.Namespace) -> dict:
    name = "baton_step_host_seconds"
    steps, step_s = window.total("baton_step_duration_seconds_count"), window.mean("baton_step_duration_seconds")
    found = {
        "steps": steps, "step_ms": 1e3 * step_s, "sequences": window.mean("baton_step_sequences"),
        "launched": window.total("baton_step_launches_total", way="launched"), "idle_seen": window.total("baton_step_idle_seconds_count"),
        "idle": window.total("baton_step_idle_seconds_sum") / max(1e-9, window.total("baton_step_duration_seconds_sum")),
        "parts": {},
    }  # fmt: skip
    print(f"{given.streams} streams on {given.device}: {steps:.0f} steps of {found['step_ms']:.3f} ms, {found['sequences']:.1f} sequences each")
    for part in (*COUNTED, *BESIDE):
        # Of the front's there may be fewer batches than steps: what it costs a step.
        mean = window.total(f"{name}_sum", part=part) / max(1.0, steps)
        median, high = (window.quantile(name, each, part=part) for each in (0.5, 0.99))
        found["parts"][part] = {"mean_ms": 1e3 * mean, "p50_ms": 1e3 * median, "p99_ms": 1e3 * high}
        print(
            f"  {part:<9} mean {1e3 * mean:7.4f} ms  p50 {1e3 * median:7.4f}  p99 {1e3 * high:7.4f}{'  (not in the sum)' if part in BESIDE else ''}"
        )
    found |= {f"sum_{kind}": sum(found["parts"][part][kind] for part in COUNTED) for kind in ("mean_ms", "p50_ms", "p99_ms")}
    return found


def judged(found: dict, given: argparse.Namespace) -> bool:
    on_gpu = given.device.startswith("cuda")
    good = {
        f"sum of the means {found['sum_mean_ms']:.4f} ms, target below {SUM_TARGET_MS} (of p50, within buckets, {found['sum_p50_ms']:.4f})": (
            found["sum_mean_ms"] < SUM_TARGET_MS
        ),
        f"sequences in a step {found['sequences']:.2f} of {given.streams}, target 99 %": found["sequences"] >= 0.99 * given.streams,
    }  # fmt: skip
    print(
        f"sum of the means with launch {found['sum_mean_ms'] + found['parts']['launch']['mean_ms']:.4f} ms; "
        f"sum of p99 {found['sum_p99_ms']:.4f} ms (parts of different steps)"
    )
    if on_gpu:
        good[f"GPU idle between steps {100 * found['idle']:.3f} % of a step, target below {100 * IDLE_TARGET} %"] = found["idle"] < IDLE_TARGET
        good[f"gaps seen {found['idle_seen']:.0f} of {found['steps']:.0f} steps, target 95 %"] = found["idle_seen"] >= 0.95 * found["steps"]
        good[f"steps launched kernel by kernel {found['launched']:.0f}, target 0"] = found["launched"] == 0
    for line, met in good.items():
        print(f"{line}: {'met' if met else 'MISSED'}")
    return all(good.values())


def main() -> int:
    parser = arguments(__doc__, kv_bytes=36 << 30)
    parser.add_argument("--prefill-kv-bytes", type=int, default=8 << 30, help="--kv-bytes is decode's")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--stream-tokens", type=int, default=3000)
    parser.add_argument("--settle-s", type=float, default=1.0)
    parser.add_argument("--window-s", type=float, default=5.0)
    given = parser.parse_args()
    with serving(given) as served:
        flags = served.worker_flags(
            kv_bytes=given.prefill_kv_bytes, max_running=given.streams, max_batched_tokens=max(STREAM_PROMPT, given.streams),
            max_model_len=STREAM_PROMPT + given.stream_tokens,
        )  # fmt: skip
        own = (f"--kv-bytes={given.kv_bytes}", "--metrics-exporter=prometheus", "--metrics-port=0")
        supervisor, start = served.fleet("split", worker_flags=flags, decode_flags=own)
        fleet = start()
        window = asyncio.run(drive(fleet.grpc, metrics_address(supervisor), served.model.name, given))
    found = told(window, given)
    good = judged(found, given)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
