"""Which servers there are, how requests are spread over them."""

from dataclasses import dataclass, field, replace

import numpy as np

from baton.bench.errors import require
from baton.bench.plan.job import ServerLimits

ROUTINGS = ("least-load", "round-robin")


@dataclass(frozen=True)
class FleetShape:
    """Either plain servers, or prefill and decode servers. `num_per_host`: servers that share a machine and slow each other; 1: each has its own."""

    num_plain: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    limits: ServerLimits = field(default_factory=ServerLimits)
    routing: str = "least-load"
    num_per_host: int = 1

    def __post_init__(self) -> None:
        for name in ("num_plain", "num_prefill", "num_decode"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        is_split, servers = self.is_split, (self.num_plain, self.num_prefill, self.num_decode)
        fits = min(self.num_prefill, self.num_decode) >= 1 and not self.num_plain if is_split else self.num_plain >= 1
        require(fits, "num_plain, num_prefill, num_decode", servers, "plain servers alone, or at least one prefill and one decode server")
        require(self.routing in ROUTINGS, "routing", self.routing, f"one of {', '.join(ROUTINGS)}")
        require(self.num_per_host >= 1, "num_per_host", self.num_per_host, "at least 1")

    @property
    def is_split(self) -> bool:
        return bool(self.num_prefill or self.num_decode)

    @property
    def num_servers(self) -> int:
        return self.num_plain + self.num_prefill + self.num_decode

    @property
    def name(self) -> str:
        return f"{self.num_prefill}P:{self.num_decode}D" if self.is_split else f"{self.num_plain} plain"

    def of(self, *, plain: int = 0, prefill: int = 0, decode: int = 0) -> "FleetShape":
        """The same kind of servers in other numbers."""
        return replace(self, num_plain=plain, num_prefill=prefill, num_decode=decode)


class Picker:
    """The gateway's choice of one server: the least of `loads`, equal ones in turns; or all in turns.

    Of all pairs of a prefill and a decode server the least loaded one is that of the least loaded of each, so each is chosen alone."""

    def __init__(self, num_servers: int, routing: str) -> None:
        self.loads = np.zeros(num_servers, dtype=np.int64)
        self._least = routing == "least-load"
        self._turn = -1

    def pick(self) -> int:
        self._turn = turn = (self._turn + 1) % len(self.loads)
        if not self._least:
            return turn
        after, before = turn + int(self.loads[turn:].argmin()), int(self.loads[: turn + 1].argmin())
        return after if self.loads[after] <= self.loads[before] else before
