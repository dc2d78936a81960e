"""Costs that were fitted to measurements, how well they fit, and how sure they are; and its file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.bench.errors import BenchFileError
from baton.bench.plan.costs import Costs

VERSION = 1


@dataclass(frozen=True)
class Residuals:
    """Of one kind of measurement: measured over fitted, less 1. `median`: half of the points are nearer than this; `p90`: nine of ten."""

    num: int
    median: float
    p90: float


@dataclass(frozen=True)
class Calibration:
    """`replicates`: costs fitted to resamples of the same points; how far they differ is how sure `costs` are. `residuals`: by kind of point.

    `tokens_per_word`, `template_tokens`: of prompts, to turn a workload's words into tokens. `notes`: what was not measured and what was assumed."""

    costs: Costs
    replicates: tuple[Costs, ...]
    residuals: dict[str, Residuals]
    tokens_per_word: float
    template_tokens: float
    source: str
    notes: tuple[str, ...] = ()

    def replicate(self, seed: int) -> Costs:
        return self.replicates[seed % len(self.replicates)] if self.replicates else self.costs


def save(calibration: Calibration, path: Path) -> None:
    body = asdict(calibration) | {"version": VERSION}
    path.write_text(json.dumps(body, indent=1) + "\n")


def load(path: Path) -> Calibration:
    """Raises BenchFileError, OSError."""
    try:
        body = json.loads(path.read_text())
    except ValueError as error:
        raise BenchFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(body, dict) or body.pop("version", None) != VERSION:
        raise BenchFileError(f"{path} is not a calibration of version {VERSION}: make one with `baton plan fit` or `baton plan calibrate`")
    return _read(path, body)


def _read(path: Path, body: Mapping[str, Any]) -> Calibration:
    try:
        made = {
            "costs": Costs.from_json(body["costs"]),
            "replicates": tuple(map(Costs.from_json, body["replicates"])),
            "residuals": {name: Residuals(**found) for name, found in body["residuals"].items()},
            "notes": tuple(body["notes"]),
        }
        return Calibration(**{**body, **made})
    except (KeyError, TypeError) as error:
        raise BenchFileError(f"{path}: the calibration has other fields than this version writes: {error}") from error
