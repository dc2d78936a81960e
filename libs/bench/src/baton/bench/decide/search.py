"""Which load to try next: brackets the highest rate that meets the objectives, then halves the bracket. Pure.

All topologies share one grid of rates, so that what they did under the same load can be compared."""

from dataclasses import dataclass, field

from baton.bench.errors import require


@dataclass(frozen=True)
class RateGrid:
    """Rate of place k: `start_rps` x `step` to the power of k. `stride` places are jumped while looking for the bracket, each time twice as
    many; places beyond `reach` on either side are not tried."""

    start_rps: float
    step: float = 1.2
    stride: int = 2
    reach: int = 30

    def __post_init__(self) -> None:
        require(self.start_rps > 0, "start_rps", self.start_rps, "above 0")
        require(1 < self.step <= 2, "step", self.step, "above 1 and at most 2")
        require(self.stride >= 1, "stride", self.stride, "at least 1")
        require(self.reach >= self.stride, "reach", self.reach, f"at least {self.stride}, the stride")

    def rate_rps(self, place: int) -> float:
        return self.start_rps * self.step**place


@dataclass
class RateSearch:
    """Of one topology. Ask for `proposal`, measure there, `note` what came of it; None is the end.

    A met place below a broken one is taken as the bracket; what contradicts it (met above broken) is left to the repeats to settle."""

    grid: RateGrid
    met: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)

    def note(self, place: int, *, met: bool) -> None:
        (self.met if met else self.broken).add(place)

    @property
    def low(self) -> int | None:
        """The highest met place below every broken one."""
        below = [place for place in self.met if self.high is None or place < self.high]
        return max(below, default=None)

    @property
    def high(self) -> int | None:
        """The lowest broken place."""
        return min(self.broken, default=None)

    @property
    def is_bracketed(self) -> bool:
        return self.low is not None and self.high is not None

    def proposal(self) -> int | None:
        low, high = self.low, self.high
        if low is None and high is None:
            return 0
        if low is None:
            return self._within(high - self._jump(self.broken)) if high is not None else None
        if high is None:
            return self._within(low + self._jump(self.met))
        return (low + high) // 2 if high - low > 1 else None

    @property
    def edges(self) -> tuple[int, ...]:
        """The places on both sides of the limit, or the one that is known."""
        return tuple(place for place in (self.low, self.high) if place is not None)

    def _jump(self, tried: set[int]) -> int:
        return self.grid.stride << (len(tried) - 1)

    def _within(self, place: int) -> int | None:
        inside = max(-self.grid.reach, min(self.grid.reach, place))
        return None if inside in self.met | self.broken else inside
