"""Measuring: one request's times, and ratios of two things measured in turns."""

from baton.bench.ratio import Comparison, compare
from baton.bench.serving import RequestTiming, ServingClient

__all__ = ["Comparison", "RequestTiming", "ServingClient", "compare"]
