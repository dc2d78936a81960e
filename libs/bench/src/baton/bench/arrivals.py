"""When requests are sent. Open-loop arrivals know their times before the run and never wait for an answer; a closed loop waits for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.bench.errors import require
from baton.bench.request import Request

Times = npt.NDArray[np.float64]


class OpenLoop(Protocol):
    """Times are seconds from the start of the run, never decreasing, and a pure function of the fields."""

    def times_s(self, num_requests: int) -> Times: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class PoissonArrivals:
    """Independent arrivals: exponential gaps of mean 1 / `rate_rps`."""

    rate_rps: float
    seed: int

    def __post_init__(self) -> None:
        require(self.rate_rps > 0, "rate_rps", self.rate_rps, "above 0")

    def times_s(self, num_requests: int) -> Times:
        return np.cumsum(np.random.default_rng(self.seed).exponential(1 / self.rate_rps, num_requests))

    def describe(self) -> str:
        return f"Poisson, {self.rate_rps:g} requests/s"


@dataclass(frozen=True)
class GammaArrivals:
    """Bursty arrivals: gamma gaps of mean 1 / `rate_rps` whose standard deviation is `cv` times their mean.

    1 is Poisson, above 1 is bursty, below is even."""

    rate_rps: float
    cv: float
    seed: int

    def __post_init__(self) -> None:
        require(self.rate_rps > 0, "rate_rps", self.rate_rps, "above 0")
        require(0 < self.cv <= 10, "cv", self.cv, "above 0 and at most 10")

    def times_s(self, num_requests: int) -> Times:
        shape = 1 / self.cv**2
        return np.cumsum(np.random.default_rng(self.seed).gamma(shape, 1 / (self.rate_rps * shape), num_requests))

    def describe(self) -> str:
        return f"gamma, {self.rate_rps:g} requests/s, coefficient of variation {self.cv:g}"


@dataclass(frozen=True)
class TraceArrivals:
    """Arrivals as they were recorded, moved so that the first is at 0, and `speed` times faster."""

    at_s: tuple[float, ...]
    speed: float = 1.0

    def __post_init__(self) -> None:
        require(self.speed > 0, "speed", self.speed, "above 0")
        require(all(a <= b for a, b in pairwise(self.at_s)), "at_s", f"{len(self.at_s)} times", "in order of time")

    def times_s(self, num_requests: int) -> Times:
        require(num_requests <= len(self.at_s), "num_requests", num_requests, f"at most {len(self.at_s)}, the length of the trace")
        times = np.asarray(self.at_s[:num_requests], dtype=np.float64)
        return (times - times[:1]) / self.speed

    def describe(self) -> str:
        return f"trace, {self.speed:g} times its speed"


@dataclass(frozen=True)
class ClosedLoop:
    """`num_clients` clients, each of which sends its next request `think_s` after the answer to the one before has ended."""

    num_clients: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.num_clients >= 1, "num_clients", self.num_clients, "at least 1")
        require(self.think_s >= 0, "think_s", self.think_s, "at least 0")

    def describe(self) -> str:
        return f"closed loop, {self.num_clients} clients" + (f", {self.think_s:g} s between answer and next request" if self.think_s else "")


Arrivals = OpenLoop | ClosedLoop


def gap_statistics(times_s: Times | Sequence[float]) -> tuple[float, float]:
    """(mean gap in seconds, coefficient of variation) of at least two times."""
    gaps = np.diff(np.asarray(times_s, dtype=np.float64))
    return float(gaps.mean()), float(gaps.std() / gaps.mean())


ARRIVAL_NAMES = ("poisson", "gamma", "trace", "closed")


@dataclass(frozen=True)
class ArrivalOptions:
    """What a command line says."""

    name: str = "poisson"
    rate_rps: float = 1.0
    cv: float = 2.0
    num_clients: int = 4
    think_s: float = 0.0
    speed: float = 1.0
    seed: int = 0


def build_arrivals(options: ArrivalOptions, requests: Sequence[Request]) -> Arrivals:
    """Raises SettingError for an unknown name, a value out of range, or `trace` for requests that have no times."""
    if options.name == "poisson":
        return PoissonArrivals(options.rate_rps, options.seed)
    if options.name == "gamma":
        return GammaArrivals(options.rate_rps, options.cv, options.seed)
    if options.name == "closed":
        return ClosedLoop(options.num_clients, options.think_s)
    require(options.name == "trace", "arrivals", options.name, f"one of {', '.join(ARRIVAL_NAMES)}")
    times_s = [request.arrival_s for request in requests if request.arrival_s is not None]
    require(len(times_s) == len(requests), "arrivals", options.name, "another one: the requests have no times (those of mooncake have)")
    return TraceArrivals(tuple(times_s), options.speed)
