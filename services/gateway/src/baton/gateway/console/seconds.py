"""What happened in each of the last seconds, in memory that does not grow. Pure."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

NUM_SECONDS = 300
#: Latencies are counted in buckets, each 15 % wider than the one before, from 0.1 ms to ten minutes: a percentile is right within 7.5 %.
FIRST_MS = 0.1
GROWTH = 1.15
NUM_BUCKETS = 112
_LOG_GROWTH = math.log(GROWTH)


def bucket_of(value_ms: float) -> int:
    """Which bucket counts `value_ms`; the ends take what lies beyond them."""
    if value_ms <= FIRST_MS:
        return 0
    return min(NUM_BUCKETS - 1, 1 + int(math.log(value_ms / FIRST_MS) / _LOG_GROWTH))


def middle_of(bucket: int) -> float:
    """Milliseconds that stand for a bucket: the geometric middle of its ends."""
    return FIRST_MS * GROWTH ** (bucket - 0.5) if bucket else FIRST_MS


def _counts() -> array[int]:
    return array("I", bytes(4 * NUM_BUCKETS))


@dataclass(slots=True)
class _Second:
    second: int = -1
    num: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    ttft: array[int] = field(default_factory=_counts)
    itl: array[int] = field(default_factory=_counts)

    def begin(self, second: int) -> None:
        self.second, self.num, self.num_failed, self.num_tokens = second, 0, 0, 0
        self.ttft, self.itl = _counts(), _counts()


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds together. ttft, itl: bucket -> requests."""

    num: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    itl: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: Window) -> Window:
        return Window(
            self.num + other.num,
            self.num_failed + other.num_failed,
            self.num_tokens + other.num_tokens,
            self.ttft + other.ttft,
            self.itl + other.itl,
        )


class Seconds:
    """Counts ended requests by the second in which they ended. Seconds are whole numbers of one clock that does not run backwards."""

    def __init__(self) -> None:
        self._ring = [_Second() for _ in range(NUM_SECONDS)]

    def add(self, second: int, *, failed: bool, num_tokens: int, ttft_ms: float, itl_ms: float) -> None:
        """One request. A time of 0 is one that it never had."""
        slot = self._ring[second % NUM_SECONDS]
        if slot.second != second:
            slot.begin(second)
        slot.num += 1
        slot.num_failed += failed
        slot.num_tokens += num_tokens
        if ttft_ms > 0:
            slot.ttft[bucket_of(ttft_ms)] += 1
        if itl_ms > 0:
            slot.itl[bucket_of(itl_ms)] += 1

    def window(self, first: int, width: int) -> Window:
        """Seconds first, first + 1, ..., `width` of them; those that are too old or not there yet count nothing."""
        wanted = (self._ring[second % NUM_SECONDS] for second in range(first, first + width))
        slots = [slot for second, slot in zip(range(first, first + width), wanted, strict=True) if slot.second == second and slot.num]
        return Window(
            sum(slot.num for slot in slots),
            sum(slot.num_failed for slot in slots),
            sum(slot.num_tokens for slot in slots),
            _sum(slot.ttft for slot in slots),
            _sum(slot.itl for slot in slots),
        )


def _sum(counts: Iterable[array[int]]) -> Counter[int]:
    summed = (sum(column) for column in zip(*counts, strict=True))
    return Counter({bucket: count for bucket, count in enumerate(summed) if count})


def percentile(counts: Counter[int], share: float) -> float | None:
    """Milliseconds that `share` of all are not above, by nearest rank; None of nothing."""
    rank = math.ceil(share * counts.total())
    if rank == 0:
        return None
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return round(middle_of(bucket), 3)
    raise AssertionError("the counts add up to fewer than their sum")
