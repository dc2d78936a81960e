"""Does the split pay? Topologies of the same devices under rising load, and a verdict with its evidence."""

from baton.bench.decide.record import DecideRecord, load, save

__all__ = ["DecideRecord", "load", "save"]
