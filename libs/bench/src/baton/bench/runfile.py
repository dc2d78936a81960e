"""A run on disk: JSON lines, one record each: first the run, then every repeat and its samples."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from baton.bench.energy import DeviceEnergy, Energy, total
from baton.bench.errors import BenchFileError
from baton.bench.generator import Measured
from baton.bench.sample import Sample

VERSION = 1


@dataclass(frozen=True)
class RunHeader:
    """`session`: equal for runs that one command measured in turns. `workload` and `arrivals`: as they describe themselves for repeat 0."""

    name: str
    target: str
    model: str
    workload: dict[str, str | int | float]
    arrivals: str
    num_requests: int
    num_warm_up: int
    num_repeats: int
    session: str
    started_at: str
    machine: str


@dataclass(frozen=True)
class Run:
    """`samples` without those of the warm-up. `energy`: of all repeats together; None if none was asked for."""

    header: RunHeader
    samples: tuple[Sample, ...]
    loop_lag_s: tuple[float, ...]
    energy: Energy | None = None

    @property
    def repeats(self) -> list[list[Sample]]:
        """Samples of each repeat, in order of their index."""
        numbers = sorted({sample.repeat for sample in self.samples})
        return [sorted((sample for sample in self.samples if sample.repeat == number), key=lambda sample: sample.index) for number in numbers]


class RunWriter:
    """Creates the file. `add` has written when it returns, so that a run that is stopped leaves its whole repeats. `close` when done."""

    def __init__(self, path: Path, header: RunHeader) -> None:
        self.path = path
        self._file: IO[str] = path.open("w")
        self._write({"record": "run", "version": VERSION} | asdict(header))
        self._file.flush()

    def add(self, repeat: int, samples: Sequence[Sample], measured: Measured, energy: Energy | None = None) -> None:
        said = {} if energy is None else {"energy": asdict(energy)}
        self._write({"record": "repeat", "repeat": repeat, "loop_lag_s": [round(lag, 6) for lag in measured.loop_lag_s]} | said)
        for sample in samples:
            self._write({"record": "sample"} | sample.to_json())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


def load_run(path: Path) -> Run:
    """Raises BenchFileError with the line that is not of this form, OSError."""
    header: RunHeader | None = None
    samples: list[Sample] = []
    lags_s: list[float] = []
    energies: list[Energy] = []
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            record = _record(f"{path}:{number}", line)
            kind = record.pop("record", None)
            if number == 1:
                header = _header(path, kind, record)
            elif kind == "repeat":
                lags_s += record["loop_lag_s"]
                energies += [_energy(f"{path}:{number}", record["energy"])] if "energy" in record else []
            elif kind == "sample":
                samples.append(Sample.from_json(record))
            else:
                raise BenchFileError(f"{path}:{number}: record is {kind!r}, but must be 'repeat' or 'sample'")
    if header is None:
        raise BenchFileError(f"{path} is empty")
    return Run(header, tuple(sample for sample in samples if not sample.is_warm_up), tuple(lags_s), total(energies))


def _energy(where: str, body: Any) -> Energy:
    try:
        devices = tuple(DeviceEnergy(**(one | {"roles": tuple(one["roles"])})) for one in body["devices"])
        return Energy(devices, body["missing"])
    except (TypeError, KeyError) as error:
        raise BenchFileError(f"{where}: the energy has other fields than this version writes: {error}") from error


def _record(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BenchFileError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BenchFileError(f"{where} holds a {type(record).__name__}, but every line of a run is an object")
    return record


def _header(path: Path, kind: Any, record: dict[str, Any]) -> RunHeader:
    version = record.pop("version", None)
    if (kind, version) != ("run", VERSION):
        raise BenchFileError(f"{path} begins with record {kind!r} of version {version!r}, but a run begins with 'run' of version {VERSION}")
    try:
        return RunHeader(**record)
    except TypeError as error:
        raise BenchFileError(f"{path}: the run has other fields than this version writes: {error}") from error
