"""Records of decide runs whose truth is known: a topology is good for everybody up to its limit and for nobody far above it."""

from collections.abc import Mapping, Sequence

from baton.bench.decide.record import VERSION, Cell, DecideRecord, Equality, IdlePoint, Machine, Targets, Topology
from baton.bench.percentiles import Percentiles

ONE = Topology("one", "one", 1, 0, 0, ("plain-0",))


def copies(num: int = 2) -> Topology:
    return Topology("copies", "copies", num, 0, 0, tuple(f"plain-{place}" for place in range(num)))


def split(num_prefill: int = 1, num_decode: int = 1) -> Topology:
    return Topology(f"split-{num_prefill}-{num_decode}", "split", 0, num_prefill, num_decode, ("prefill-0", "decode-1"))


def percentiles(value: float) -> Percentiles:
    return Percentiles(10, value, value, value, value, value, value)


def cell(topology: str, rate_rps: float, share: float, *, num: int = 100, number: int = 0, missed: str = "ttft", **fields: object) -> Cell:
    bad = num - round(share * num)
    values = {
        "number": number,
        "topology": topology,
        "phase": "repeat",
        "round": 0,
        "rate_rps": rate_rps,
        "seed": 0,
        "samples": f"cells/{number}.jsonl",
        "started_s": 0.0,
        "duration_s": num / rate_rps,
        "num_requests": num,
        "num_good": num - bad,
        "num_failed": bad if missed == "errors" else 0,
        "num_late_first": bad if missed == "ttft" else 0,
        "num_slow_gaps": bad if missed == "itl" else 0,
        "num_long": 10,
        "errors": {},
        "failures": {},
        "goodput_rps": share * rate_rps,
        "output_tokens_per_s": 10 * rate_rps,
        "ttft_ms": percentiles(100.0),
        "itl_ms": percentiles(20.0),
        "tpot_ms": percentiles(20.0),
        "e2e_ms": percentiles(500.0),
        "itl_during_ms": percentiles(30.0),
        "itl_without_ms": percentiles(20.0),
        "server": {},
        "tokens_reported": 100,
        "tokens_retokenised": 100,
        "num_tokens_differing": 0,
        "lag": (),
    }
    return Cell(**(values | fields))  # type: ignore[arg-type]


def idle(topology: str, prompt_tokens: int, ttft_ms: float, **fields: object) -> IdlePoint:
    values = {"topology": topology, "prompt_tokens": prompt_tokens, "concurrency": 1, "num": 3, "ttft_ms": ttft_ms, "itl_ms": 20.0}
    return IdlePoint(**(values | fields))  # type: ignore[arg-type]


def record(topologies: Sequence[Topology], cells: Sequence[Cell], **fields: object) -> DecideRecord:
    machine = Machine("a cpu", 2, 2**34, "Linux", (), {"torch": "2"}, 0.1)
    values = {
        "version": VERSION,
        "created_at": "2026-11-30T00:00:00+00:00",
        "command": "baton decide",
        "model": "m",
        "devices": ("cpu:0", "cpu:1"),
        "shared_device": False,
        "machine": machine,
        "targets": Targets(500.0, 60.0, 0.9, "given"),
        "workload": {"workload": "chat", "seed": 0},
        "chunk_tokens": 32,
        "servers": (),
        "topologies": tuple(topologies),
        "idle": (),
        "equality": Equality(3, 12, ()),
        "cells": tuple(cells),
    }
    return DecideRecord(**(values | fields))  # type: ignore[arg-type]


def swept(limits_rps: Mapping[str, float], *, num: int = 100, num_repeats: int = 3, missed: Mapping[str, str] | None = None) -> list[Cell]:
    """Cells on one grid around every limit: all good below, half good just above, none good beyond."""
    grid = [1.2**place for place in range(-6, 14)]
    cells = []
    for topology, limit in limits_rps.items():
        for rate in (rate for rate in grid if limit / 1.6 < rate < 1.8 * limit):
            share = 1.0 if rate <= limit else 0.5 if rate < 1.25 * limit else 0.0
            breaks = (missed or {}).get(topology, "ttft")
            cells += [cell(topology, rate, share, num=num, number=len(cells), missed=breaks) for _ in range(num_repeats)]
    return cells
