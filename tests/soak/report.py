"""A soak in words and numbers."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections import Counter
from pathlib import Path

from soak.house import House
from soak.rounds import Round

PROMISE = """\
Every request that was not taken back by its client ended as an undisturbed run of it does, token for token, or with a named cause; none outlived its
deadline. *cut off*: its gateway was killed or stopped while it was open. *not taken*: there was no connection to send it over."""
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def text_of(rounds: list[Round], house: House, num_clients: int, command: str) -> str:
    where = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, {_machine()}, load average at the end {os.getloadavg()[1]:.1f}."
    what = f"2 prefill servers, 2 decode servers, 2 gateways, {num_clients} clients at once (half gRPC, half HTTP; greedy and sampled prompts), "
    what += f"SmolLM2-135M in float32, every digest compared. The fleet is {house.fleet_is}."
    parts = [
        "# Soak",
        f"    {command}",
        f"{where} {what}",
        PROMISE,
        _requests(rounds),
        "## Failures by name",
        _failures(rounds),
        "## Restarts",
        "From the signal until both gateways had every pair again.",
        _restarts(rounds),
        "## What is held when nothing is asked, after each round",
        _held(rounds),
    ]
    return "\n\n".join(parts) + "\n"


def write(text: str) -> Path:
    path = RESULTS / f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}-soak.md"
    path.write_text(text, encoding="utf-8")
    return path


def _requests(rounds: list[Round]) -> str:
    rows = []
    for number, one in enumerate(rounds):
        said = one.judgement
        times = sorted(said.seconds)
        middle, late = (statistics.median(times), times[int(len(times) * 0.99)]) if times else (0.0, 0.0)
        counts = (said.total, said.right, said.num_failed, said.cut_off, said.not_taken, said.cancelled)
        rows.append([str(number), f"{one.seconds:.0f} s", *map(str, counts), f"{middle:.1f} s", f"{late:.1f} s"])
    return _table(["round", "lasted", "requests", "right", "failed by name", "cut off", "not taken", "taken back", "p50", "p99"], rows)


def _failures(rounds: list[Round]) -> str:
    failed: Counter[tuple[str, str, str, str]] = Counter()
    for one in rounds:
        failed += one.judgement.failed
    return _table(["code", "cause", "origin", "stage", "requests"], [[*words, str(count)] for words, count in failed.most_common()])


def _restarts(rounds: list[Round]) -> str:
    return _table(["round", "restart", "took"], [[str(number), what, f"{s:.1f} s"] for number, one in enumerate(rounds) for what, s in one.away_s])


def _held(rounds: list[Round]) -> str:
    rows = []
    for number, one in enumerate(rounds):
        for held in sorted(one.held, key=lambda held: held.name):
            numbers = (held.rooms, held.pages, held.descriptors, held.threads)
            rows.append([str(number), held.name.split("-")[0], f"{held.memory_mib:.0f} MiB", *map(str, numbers), f"{one.shared_mib:.0f} MiB"])
    return _table(["round", "process", "memory of its own", "rooms", "pages", "descriptors", "threads", "shared memory of all"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _machine() -> str:
    models = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}, Python {platform.python_version()}"
