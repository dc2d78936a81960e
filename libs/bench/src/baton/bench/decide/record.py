"""What a run of `baton decide` leaves behind: decide.json beside the raw samples of every cell (`cells/*.jsonl`, as `baton bench run` writes them).

A *cell* is one topology under one offered load once. The verdict is a function of this record and of nothing else."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from baton.bench.decide.codec import decode
from baton.bench.energy import Energy, EnergySource
from baton.bench.errors import BenchFileError
from baton.bench.percentiles import Percentiles

FILE_NAME = "decide.json"
VERSION = 1

#: "one": a plain server on the first device; "copies": plain servers on all; "split": prefill servers on the first devices, decode on the rest.
Kind = Literal["one", "copies", "split"]
#: Why a cell was measured: to find where objectives break (bracket, then bisect), or again, in turns with the others (repeat).
Phase = Literal["bracket", "bisect", "repeat"]
Outcome = Literal["one", "copies", "split", "too_close", "none", "invalid"]


@dataclass(frozen=True)
class Machine:
    """`load_average`: of the minute before the first server was started. `num_cores`: that may be used. `versions`: package -> version."""

    cpu: str
    num_cores: int
    memory_bytes: int
    system: str
    gpus: tuple[str, ...]
    versions: dict[str, str]
    load_average: float


@dataclass(frozen=True)
class Server:
    """`role`: "plain", "prefill" or "decode". `command`: as it was started, for the reader."""

    name: str
    role: str
    device: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """`name`: "one", "copies", or "split-P-D". `servers`: names in `DecideRecord.servers`."""

    name: str
    kind: Kind
    num_plain: int
    num_prefill: int
    num_decode: int
    servers: tuple[str, ...]

    @property
    def ratio(self) -> str:
        return f"{self.num_prefill}:{self.num_decode}"


@dataclass(frozen=True)
class Targets:
    """A request is good if its TTFT and the p99 of its own gaps are within; a cell meets the objectives if at least `attainment` of its requests are.

    `source`: "given", or how they were derived. `load_rps`: the load that the user has; None asks which topology carries the most."""

    ttft_ms: float
    itl_p99_ms: float
    attainment: float
    source: str
    load_rps: float | None = None


@dataclass(frozen=True)
class IdlePoint:
    """A measurement of an otherwise idle topology: what a simulator is calibrated with. Medians of `num` requests.

    With one request at a time (`concurrency` 1) `ttft_ms` is the time of a prompt of `prompt_tokens`, `itl_ms` a decode step. With several at once
    `itl_ms` is a step of so many sequences. The rest is the split's own."""

    topology: str
    prompt_tokens: int
    concurrency: int
    num: int
    ttft_ms: float
    itl_ms: float
    bootstrap_ms: float | None = None
    transfer_ms: float | None = None
    exposed_ms: float | None = None
    kv_bytes: float | None = None
    transport: str | None = None


@dataclass(frozen=True)
class Equality:
    """Greedy answers to the same prompts, compared with those of the first topology. `different`: topologies with any other text."""

    num_prompts: int
    num_tokens: int
    different: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """`samples`: the run file, relative to the record's folder. Times in milliseconds. `started_s`: from the start of the first cell.

    `failures`: words of the failed requests' own text ("ended by gateway in WAITING ...") -> how many. `num_late_first`, `num_slow_gaps`: answered
    requests that missed the one or the other objective. `lag`: why the generator is not to be trusted here; empty if it is.
    `tokens_retokenised`: None without a tokenizer or with random weights. `energy`: None where the whole run has none."""

    number: int
    topology: str
    phase: Phase
    round: int
    rate_rps: float
    seed: int
    samples: str
    started_s: float
    duration_s: float
    num_requests: int
    num_good: int
    num_failed: int
    num_late_first: int
    num_slow_gaps: int
    num_long: int
    errors: dict[str, int]
    failures: dict[str, int]
    goodput_rps: float
    output_tokens_per_s: float
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None
    itl_during_ms: Percentiles | None
    itl_without_ms: Percentiles | None
    server: dict[str, Percentiles]
    tokens_reported: int
    tokens_retokenised: int | None
    num_tokens_differing: int
    lag: tuple[str, ...]
    energy: Energy | None = None

    @property
    def good_share(self) -> float:
        return self.num_good / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True)
class Capacity:
    """The highest load at which a topology meets the objectives, requests a second; `low` and `high` hold 90 % of the bootstrap's resamples.

    `at_least`: even the highest load that was measured was met. `at_most`: not even the lowest was (`rps` is 0 then).
    `limit`: what breaks above it: "ttft", "itl", "errors", or "" if nothing did."""

    topology: str
    rps: float
    low: float
    high: float
    at_least: bool
    at_most: bool
    limit: str


@dataclass(frozen=True)
class Contest:
    """Capacity of `subject` over that of `baseline`: median and 90 % of the bootstrap; `certainty`: part of resamples in which subject wins."""

    subject: str
    baseline: str
    ratio: float
    low: float
    high: float
    certainty: float


@dataclass(frozen=True)
class Verdict:
    """`outcome` says what was found, `recommended` which topology to run (of equals the simplest; "" for none). `headline` is one sentence;
    `reasons` are its evidence, `sizing` is about the ratio, `diagnoses` about what is wrong with any of the topologies."""

    outcome: Outcome
    recommended: str
    headline: str
    reasons: tuple[str, ...]
    sizing: tuple[str, ...]
    diagnoses: tuple[str, ...]
    capacities: tuple[Capacity, ...]
    contests: tuple[Contest, ...]


@dataclass(frozen=True)
class DecideRecord:
    """`workload`: as it describes itself for the first cell. `chunk_tokens`: most prompt tokens in a plain server's step with streams.
    `energy`: None in records of versions that did not look at it."""

    version: int
    created_at: str
    command: str
    model: str
    devices: tuple[str, ...]
    shared_device: bool
    machine: Machine
    targets: Targets
    workload: dict[str, str | int | float]
    chunk_tokens: int | None
    servers: tuple[Server, ...]
    topologies: tuple[Topology, ...]
    idle: tuple[IdlePoint, ...]
    equality: Equality
    cells: tuple[Cell, ...] = ()
    verdict: Verdict | None = None
    notes: tuple[str, ...] = field(default=())
    energy: EnergySource | None = None

    def topology(self, name: str) -> Topology:
        return next(topology for topology in self.topologies if topology.name == name)

    def cells_of(self, topology: str) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.topology == topology)

    def with_cell(self, cell: Cell) -> "DecideRecord":
        return replace(self, cells=(*self.cells, cell))


def roles_of(topologies: Iterable[Topology], servers: Iterable[Server]) -> dict[str, dict[str, tuple[str, ...]]]:
    """topology -> device -> roles of its servers there."""
    named = {server.name: server for server in servers}
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for topology in topologies:
        mine = found.setdefault(topology.name, {})
        for server in (named[name] for name in topology.servers):
            mine[server.device] = tuple(sorted({*mine.get(server.device, ()), server.role}))
    return found


def save(record: DecideRecord, folder: Path) -> Path:
    """Writes decide.json into `folder`; an earlier one there is replaced as a whole."""
    path = folder / FILE_NAME
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(asdict(record), indent=1) + "\n")
    return draft.replace(path)


def load(path: Path) -> DecideRecord:
    """From a decide run's folder or its decide.json. Raises BenchFileError with the place of what is not of this form, OSError."""
    file = path / FILE_NAME if path.is_dir() else path
    try:
        body = json.loads(file.read_text())
    except ValueError as error:
        raise BenchFileError(f"{file} is not JSON: {error}") from error
    version = body.get("version") if isinstance(body, dict) else None
    if version != VERSION:
        raise BenchFileError(f"{file} has version {version!r}, but this program reads version {VERSION}")
    return decode(DecideRecord, body, file.name)
