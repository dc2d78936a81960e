"""A prompt's pages between two GPUs with digests: written, read on both sides, compared.

    python benchmarks/gpu/transfer_digest.py --sender-device 0 --receiver-device 1

The prompt of 8,192 tokens of Qwen3-8B (36 layers, 8 KV heads of 128, bf16, pages of 64 tokens: 1.2 GB) as 72 runs of 16 MiB and as 9,216 scattered
pages of 128 KiB, between two processes, through kvtransfer and the engine's DevicePageHash. Timed is from the first `post` in the sender until the
receiver has heard the last doorbell (digest off) or compared the two digests (on); both processes are on one host and read one clock. The sender
reads its pages while they are being written. As the services do, the receiver has opened its digest before; here so has the sender.

"on": one doorbell, after which the receiver reads all pages. "on, 3 doorbells": the layers are written as three rooms, and the receiver reads
those that have landed while the next ones are on their way. Before anything is timed, one turn of each kind lands in a cleared pool, and one in which
a byte is changed after it landed: its digests must differ. Targets, of one doorbell, as services ring: 3.8 ms (runs), 5.6 ms (scattered); two GPUs
are needed for them. The digest's launch alone is held against its bytes over what a large copy reads and writes a second.

--device cpu: a tiny pool in host memory and the kernels' plain twins, to try the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from floor import measure_floor, median_s

from baton.engine import KVLayout, KVPool
from baton.engine.device.page_hash import DevicePageHash, DevicePagesDigest
from baton.engine.types import Extent
from baton.kernels import page_digest
from baton.kvtransfer import AgentConfig, Doorbell, Inbox, Region, SpanArray, open_agent, page_ids, route_spans, routes

LAYOUT = KVLayout(num_layers=36, num_kv_heads=8, head_dim=128, page_size=64, num_pages=341, itemsize=2)
NUM_PAGES = 128
TINY = replace(LAYOUT, num_layers=9, num_kv_heads=2, head_dim=8, page_size=4, num_pages=40)
TINY_PAGES = 12
TURNS, WARM_TURNS, WAIT_S = 21, 3, 30.0


@dataclass(frozen=True)
class Place:
    """Where one side's pool is. device: "cpu" or "cuda:N"."""

    device: str
    layout: KVLayout

    @property
    def agent_device(self) -> str:
        return self.device.removeprefix("cuda:") if self.device != "cpu" else ""


@dataclass(frozen=True)
class Case:
    name: str
    source: tuple[Extent, ...]
    target: tuple[Extent, ...]
    target_ms: float

    @property
    def num_pages(self) -> int:
        return sum(extent.count for extent in self.source)


@dataclass(frozen=True)
class Turn:
    """parts: consecutive layers, a doorbell each. clear: the pool is zeroed before. flip: a byte changes between landing and digest."""

    number: int
    case: Case
    parts: tuple[range, ...]
    digest: bool
    clear: bool = False
    flip: bool = False

    def room(self, part: int) -> int:
        return self.number * 8 + part + 1


@dataclass(frozen=True)
class Outcome:
    """monotonic seconds. equal: of the digests; True without."""

    ended_s: float
    equal: bool


def cases(layout: KVLayout, num_pages: int) -> list[Case]:
    random = np.random.default_rng(5)
    places = [tuple(Extent(int(page), 1) for page in random.permutation(layout.num_pages)[:num_pages]) for _ in range(2)]
    runs, pages = 2 * layout.num_layers, 2 * layout.num_layers * num_pages
    size = layout.page_bytes
    return [
        Case(f"{runs} runs of {num_pages * size >> 10:,} KiB", (Extent(9, num_pages),), (Extent(layout.num_pages - num_pages, num_pages),), 3.8),
        Case(f"{pages:,} scattered pages of {size / 1024:g} KiB", places[0], places[1], 5.6),
    ]


def parts_of(num_layers: int) -> tuple[range, ...]:
    """What lands last is little: two thirds, two ninths, a ninth."""
    first, second = num_layers * 2 // 3, num_layers * 8 // 9
    return range(first), range(first, second), range(second, num_layers)


def open_side(place: Place, instance_id: str) -> tuple[Any, KVPool, Region]:
    """An agent, a pool, and the pool as that agent knows it. The GPU's context comes before its agent, as in the services."""
    pool = None
    if place.device != "cpu":
        torch.cuda.set_device(place.device)
        pool = KVPool(place.layout, torch.bfloat16, device=place.device)
    agent: Any = open_agent(AgentConfig(instance_id=instance_id, transport="shm", device=place.agent_device))
    if pool is not None:
        return agent, pool, agent.register(pool.address, place.layout.pool_bytes)
    region = agent.allocate(place.layout.pool_bytes)
    return agent, KVPool(place.layout, torch.bfloat16, region.buffer), region


class Receiver:
    """Digests and compares on the notifier's thread."""

    def __init__(self, place: Place, pipe: Connection) -> None:
        self._place, self._pipe = place, pipe
        self._agent, self._pool, region = open_side(place, "receiver")
        self._hash = DevicePageHash(self._pool)
        self._inbox = self._agent.open_inbox("sender", region, 8)
        self._agent.on_doorbell(self._rung)
        self._outcomes: queue.SimpleQueue[Outcome | Exception] = queue.SimpleQueue()
        self._turn: Turn | None = None
        self._digest: DevicePagesDigest | None = None
        self._landed, self._sent = 0, 0

    def serve(self) -> None:
        with self._agent:
            self._pipe.send(self._inbox.invitation)
            while (turn := self._pipe.recv()) is not None:
                if turn.clear:
                    self._pool.planes.zero_()
                    self._settle()
                self._digest = None
                if turn.digest:
                    self._digest = self._hash.open(turn.case.target, 0, turn.case.num_pages)
                    self._digest.prepare()
                    self._settle()
                self._turn, self._landed, self._sent = turn, 0, -1
                slots = [self._inbox.arm(turn.room(part), 1) for part in range(len(turn.parts))]
                self._pipe.send(slots)
                self._pipe.send(self._outcomes.get(timeout=WAIT_S))
                for slot in slots:
                    self._inbox.disarm(slot)

    def _settle(self) -> None:
        if self._place.device != "cpu":
            torch.cuda.synchronize()

    def _rung(self, inbox: Inbox) -> None:
        try:
            for bell in inbox.poll():
                self._land(bell)
        except Exception as error:
            self._outcomes.put(error)

    def _land(self, bell: Doorbell) -> None:
        turn, digest = self._turn, self._digest
        assert turn is not None
        layers = turn.parts[bell.room - turn.room(0)]
        self._landed += 1
        if turn.flip and layers.stop == self._place.layout.num_layers:
            page = turn.case.target[-1].first
            self._pool.pages(layers[-1])[1][page].view(torch.uint8)[-1, -1, -1] ^= 1
            self._settle()
        if digest is not None:
            digest.ahead(layers, 0, turn.case.num_pages, None)
        if bell.has_digest:
            self._sent = bell.digest
        if self._landed == len(turn.parts):
            equal = digest is None or digest.value() == self._sent
            self._outcomes.put(Outcome(time.monotonic(), equal))


def receive(place: Place, pipe: Connection) -> None:
    Receiver(place, pipe).serve()


class Sender:
    def __init__(self, here: Place, there: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(there, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._layout = here.layout
        self._agent, self.pool, region = open_side(here, "sender")
        self.pool.planes.view(torch.int16).random_()
        if here.device != "cpu":
            torch.cuda.synchronize()
        self._hash = DevicePageHash(self.pool)
        self._peer = self._agent.connect(self._hear(), region)
        self._ended: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._agent.on_write(self._ended.put)
        self._number = 0
        (self._route,) = routes(here.layout.num_kv_heads, 1, 1)
        self._spans: dict[tuple[str, range], SpanArray] = {}

    def describe(self) -> str:
        return f"{self._agent.description}; writes go over {self._peer.transport}"

    def _hear(self) -> Any:
        if not self._pipe.poll(4 * WAIT_S):
            raise TimeoutError(f"the receiver said nothing for {4 * WAIT_S:g} s")
        heard = self._pipe.recv()
        if isinstance(heard, Exception):
            raise heard
        return heard

    def spans(self, case: Case, layers: range) -> SpanArray:
        key = case.name, layers
        if key not in self._spans:
            source, target = (page_ids([(extent.first, extent.count) for extent in extents]) for extents in (case.source, case.target))
            each = [route_spans(self._route, self._layout, self._layout, layer, source, target, 0, case.num_pages) for layer in layers]
            self._spans[key] = np.concatenate(each)
        return self._spans[key]

    def turn(self, case: Case, parts: tuple[range, ...], digest: bool, *, clear: bool = False, flip: bool = False) -> tuple[float, bool]:
        """-> seconds, and whether the receiver found the digests equal."""
        self._number += 1
        turn = Turn(self._number, case, parts, digest, clear, flip)
        self._pipe.send(turn)
        spans = [self.spans(case, layers) for layers in parts]
        reading = self._hash.open(case.source, 0, case.num_pages) if digest else None
        if reading is not None:
            reading.prepare()
        handles = [self._peer.begin(turn.room(part)) for part in range(len(parts))]
        slots = self._hear()
        start = time.monotonic()
        for part, handle in enumerate(handles):
            handle.post(spans[part])
            if part < len(parts) - 1:
                handle.finish(slots[part], Doorbell(turn.room(part), 1))
        if reading is not None:
            reading.ahead(range(self._layout.num_layers), 0, case.num_pages, None)
        value = reading.value() if reading is not None else 0
        handles[-1].finish(slots[-1], Doorbell(turn.room(len(parts) - 1), 1, digest=value, has_digest=digest))
        for _ in handles:
            self._ended.get(timeout=WAIT_S)
        for handle in handles:
            if handle.error:
                raise handle.error
        outcome = self._hear()
        return outcome.ended_s - start, outcome.equal

    def close(self) -> None:
        self._agent.close()
        self._pipe.send(None)
        self._process.join(20)


def digest_alone_s(pool: KVPool, case: Case) -> float:
    """Of device time, of one launch over all pages."""
    layout = pool.layout
    planes = pool.planes.view(2 * layout.num_layers, layout.num_pages, layout.page_size, -1).view(torch.uint8)
    device = pool.planes.device
    numbers = torch.tensor([page for extent in case.source for page in range(extent.first, extent.first + extent.count)], dtype=torch.int32).to(
        device
    )
    state = torch.zeros(1 + len(planes) * len(numbers), dtype=torch.int64, device=device)
    return median_s(lambda: page_digest(planes, numbers, state, range(len(planes)), range(len(numbers))), 15)


def checked(sender: Sender, case: Case, kinds: dict[str, tuple[tuple[range, ...], bool]]) -> bool:
    """What is wrong is printed."""
    good = True
    for name, (parts, digest) in kinds.items():
        if digest:
            _, equal = sender.turn(case, parts, digest, clear=True)
            _, flipped = sender.turn(case, parts, digest, clear=True, flip=True)
            good = good and equal and not flipped
            print(
                f"check {case.name}, {name}: digests {'equal' if equal else 'DIFFER'}; with a byte changed {'EQUAL' if flipped else 'they differ'}",
                flush=True,
            )
    return good


def measured(sender: Sender, case: Case, kinds: dict[str, tuple[tuple[range, ...], bool]], turns: int, judged: bool) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in kinds}
    good = True
    for number in range(WARM_TURNS + turns):
        for name, (parts, digest) in kinds.items():
            took, equal = sender.turn(case, parts, digest)
            good = good and equal
            if number >= WARM_TURNS:
                found[name].append(1e3 * took)
    medians = {name: median(times) for name, times in found.items()}
    line = {"case": case.name, "ms": medians, "quartiles_ms": {name: quantiles(times)[::2] for name, times in found.items()}, "equal": good}
    line |= {"target_ms": case.target_ms, "met": good and (medians["on"] <= case.target_ms or not judged)}
    each = ", ".join(
        f"digest {name} {took:.3f} ms ({line['quartiles_ms'][name][0]:.3f} to {line['quartiles_ms'][name][1]:.3f})" for name, took in medians.items()
    )
    verdict = ("met" if line["met"] else "MISSED") if judged else "not judged here"
    print(f"{case.name}: {each}; target {case.target_ms} ms with digest: {verdict}{'' if good else '; DIGESTS DIFFERED'}", flush=True)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sender-device", type=int, default=0)
    parser.add_argument("--receiver-device", type=int, default=0)
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of each kind, in turns; default: {TURNS}")
    parser.add_argument("--json", type=Path, help="write what was found there too")
    given = parser.parse_args()
    layout, num_pages = (LAYOUT, NUM_PAGES) if given.device == "cuda" else (TINY, TINY_PAGES)
    here, there = (Place(f"cuda:{number}" if given.device == "cuda" else "cpu", layout) for number in (given.sender_device, given.receiver_device))
    whole = (range(layout.num_layers),)
    kinds = {"off": (whole, False), "on": (whole, True), "on, 3 doorbells": (parts_of(layout.num_layers), True)}
    # Two processes of one GPU take turns on it, and copies within one are no transfer over NVLink.
    judged = given.device == "cuda" and here.device != there.device
    sender = Sender(here, there)
    print(f"{sender.describe()}; {here.device} to {there.device}, {layout.num_layers} layers, {num_pages} pages", flush=True)
    lines = []
    good = True
    for case in cases(layout, num_pages):
        good = checked(sender, case, kinds) and good
    if good:
        copy_bytes_per_s = measure_floor(here.device).copy_bytes_per_s if given.device == "cuda" else 0.0
        for case in cases(layout, num_pages):
            lines.append(measured(sender, case, kinds, given.turns, judged))
            if given.device == "cuda":
                alone, num_bytes = digest_alone_s(sender.pool, case), 2 * layout.num_layers * num_pages * layout.page_bytes
                lines[-1] |= {"digest_alone_ms": 1e3 * alone, "floor_ms": 1e3 * num_bytes / copy_bytes_per_s}
                ratio = lines[-1]["floor_ms"] / lines[-1]["digest_alone_ms"]
                print(f"  the digest's launch alone {1e3 * alone:.3f} ms, floor {lines[-1]['floor_ms']:.3f} ms, {ratio:.2f} of it", flush=True)
    sender.close()
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1))
    good = good and all(line["met"] for line in lines)
    print("all is well" if good else "MISSED or wrong: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
