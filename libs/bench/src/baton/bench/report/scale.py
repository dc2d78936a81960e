"""From values to places on a drawing, with ticks at round numbers."""

import math
from dataclasses import dataclass

NUM_TICKS = 5
#: Far above the smallest number there is, far below anything that is measured.
LEAST_WIDTH = 1e-300


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end]; logarithmic if `is_log` (low must be above 0)."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def over(cls, values: list[float], start: float, end: float, *, is_log: bool = False, from_zero: bool = False) -> "Scale":
        """Around all values, never empty."""
        if is_log:
            positive = [value for value in values if value > 0] or [1.0]
            low, high = min(positive), max(positive)
            return cls(low / 1.1, high * 1.1 if high > low else high * 2, start, end, True)
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        low = min(0.0, low) if from_zero else low
        # Values that differ by less than their own rounding, or by what has no logarithm left when it is divided, are one.
        differ = high - low > max(1e-9 * max(abs(low), abs(high)), LEAST_WIDTH)
        return cls(low, high + 0.05 * (high - low) if differ else low + max(1.0, abs(low)), start, end)

    def at(self, value: float) -> float:
        if self.is_log:
            value, low, high = math.log(max(value, self.low)), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        return self._log_ticks() if self.is_log else self._even_ticks()

    def _even_ticks(self) -> list[float]:
        raw = (self.high - self.low) / NUM_TICKS
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _log_ticks(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = range(first, last + 1, 1 + (last - first) // 8)
        factors = (1, 2, 5) if len(powers) <= 4 else (1,)
        return [factor * 10.0**power for power in powers for factor in factors if self.low <= factor * 10.0**power <= self.high]


def short(value: float) -> str:
    """As a reader of an axis wants it."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
