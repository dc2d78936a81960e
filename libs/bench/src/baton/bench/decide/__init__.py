"""Does the split pay? Topologies of the same devices under rising load, and a verdict with its evidence."""

from baton.bench.decide.cells import CellSetting
from baton.bench.decide.derive import Shape, chunk_tokens, start_rps, targets_of
from baton.bench.decide.idle import IdleProbe
from baton.bench.decide.record import DecideRecord, load, save
from baton.bench.decide.search import RateGrid
from baton.bench.decide.sweep import Sweep, SweepPlan
from baton.bench.decide.verdict import judge

__all__ = [
    "CellSetting",
    "DecideRecord",
    "IdleProbe",
    "RateGrid",
    "Shape",
    "Sweep",
    "SweepPlan",
    "chunk_tokens",
    "judge",
    "load",
    "save",
    "start_rps",
    "targets_of",
]
