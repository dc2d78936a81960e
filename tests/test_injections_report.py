"""The report of benchmarks/injections.py, from cells that are written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from baton.bench.energy import DeviceEnergy, Energy, EnergySource, IdlePower

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from injections_report import markdown
from injections_rows import Cell, crossover_rps, rows_of

SPLIT = Energy((DeviceEnergy("cuda:0", ("prefill",), 100.0, 5.0), DeviceEnergy("cuda:1", ("decode",), 150.0, 5.0)))
COPIES = Energy((DeviceEnergy("cuda:0", ("plain",), 200.0, 5.0), DeviceEnergy("cuda:1", ("plain",), 200.0, 5.0)))


def head(load_average: float = 0.1, num_cores: int = 2) -> dict[str, Any]:
    machine = {"cpu": "a cpu", "num_cores": num_cores, "memory_bytes": 1, "system": "Linux", "gpus": [], "versions": {}, "load_average": load_average}
    load = {"streams": 4, "answer_tokens": 96, "document_words": 384}
    return {
        "command": "python benchmarks/injections.py",
        "started_at": "now",
        "machine": machine,
        "model": "m",
        "devices": "cuda:0,cuda:1",
        "shared_device": False,
        "chunk_tokens": 32,
        "load": load,
        "repeats": 2,
        "target_ratio": 1.15,
    }


def cells(split: Energy | None, copies: Energy | None) -> list[Cell]:
    found = []
    for repeat in range(2):
        for rate in (0.0, 1.0):
            for topology, energy, during in (("split", split, 10.0), ("copies", copies, 80.0)):
                gaps = [10.0] * 90 + [during if rate else 10.0] * 10
                found.append(Cell(topology, rate, repeat, [during] if rate else [], gaps, energy=energy, num_tokens=500))
    return found


def page(found: list[Cell], source: EnergySource, **machine: Any) -> str:
    rows = rows_of(found)
    return markdown(head(**machine), source, rows, crossover_rps(rows), found, "name")


def test_joules_per_token_of_every_rate_and_topology() -> None:
    text = page(cells(SPLIT, COPIES), EnergySource(idle=(IdlePower("cuda:0", 75.0, 3.0), IdlePower("cuda:1", 76.0, 3.0))))
    assert "idle, before the servers started: cuda:0 75 W, cuda:1 76 W" in text
    assert "* split at 1 injections/s: 0.5 J (prefill 0.2, decode 0.3)" in text
    assert "* copies at 0 injections/s: 0.8 J (plain 0.8)" in text


@pytest.mark.parametrize("energy", [None, Energy(missing="cuda:0: NVML says GPU is lost")])
def test_what_was_not_measured_is_no_number(energy: Energy | None) -> None:
    source = EnergySource("no GPU among the devices") if energy is None else EnergySource()
    text = page(cells(energy, energy), source)
    assert " J (" not in text
    said = "Energy: not available: no GPU among the devices." if energy is None else "The energy of 8 of 8 cells could not be read: cuda:0: NVML"
    assert text.count(said) == 1


@pytest.mark.parametrize(
    ("num_cores", "said"),
    [
        (2, "**Other work ran on the machine (load average 1.2 on 2 cores, 60 % of them"),
        (32, "The machine was otherwise idle (load average 1.2 on 32 cores, 4 % of them"),
    ],
)
def test_a_load_is_one_of_so_many_cores(num_cores: int, said: str) -> None:
    assert said in page(cells(None, None), EnergySource("no GPU among the devices"), load_average=1.2, num_cores=num_cores)
