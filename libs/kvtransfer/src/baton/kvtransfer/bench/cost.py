"""What a transfer costs the caller: seconds a span in `post`, and the share of its time in which Python's lock is taken.

How the lock is measured: a native thread asks for it at random moments, about every 100 us, and what matters is whether it had to wait. At moments
that do not depend on what happens, the share of moments at which the lock is taken is the share of time in which it is. A wait counts when it is
longer than five times the median (a free lock takes some 100 ns; being woken after a taken one takes microseconds). Waits that have other causes,
the sampler losing its processor above all, are counted in pauses as long as the transfers, one after each, and taken off; during a transfer the
processors are busier than in its pause, so that rather too much is left than too little. Everything that runs Python in this process counts: the
caller, the thread that calls back, and this measurement's own handling of its rooms.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from baton.kvtransfer import digest
from baton.kvtransfer.bench._lock import LockSampler
from baton.kvtransfer.bench.ours import Ours

NUM_SPANS = 10_000
SPAN_BYTES = 16 << 10
TARGET_US_A_SPAN = 1.5
TARGET_LOCKED = 0.01
MEAN_PAUSE_US = 30
#: After a transfer, before its pause is watched.
SETTLE_S = 0.002
WAIT_FACTOR = 5


@dataclass(frozen=True)
class Cost:
    """taken, taken_in_pauses: shares of moments at which the lock was not free, during the transfers and between them; num_samples, during the
    transfers. transfer_s: of one room."""

    us_a_span: float
    taken: float
    taken_in_pauses: float
    num_samples: int
    num_in_pauses: int
    transfer_s: float

    @property
    def locked(self) -> float:
        """The share of the transfers' time in which Python's lock is held for them."""
        return self.taken - self.taken_in_pauses

    @property
    def error(self) -> float:
        """One standard error of `locked`."""
        pairs = ((self.taken, self.num_samples), (self.taken_in_pauses, self.num_in_pauses))
        return float(np.sqrt(sum(share * (1 - share) / count for share, count in pairs)))


def measure(transport: str, num_rooms: int) -> Cost:
    """NUM_SPANS scattered spans in one call, `num_rooms` times."""
    order = np.random.default_rng(0).permutation(NUM_SPANS) * SPAN_BYTES
    rows = np.stack([np.arange(NUM_SPANS) * SPAN_BYTES, order, np.full(NUM_SPANS, SPAN_BYTES)], axis=1)
    posts, transfers, pauses = [], [], []
    with Ours(transport, NUM_SPANS * SPAN_BYTES) as ours:
        ours.write(rows, ours.arm())  # warm
        sampler = LockSampler()
        thread = threading.Thread(target=sampler.run, args=(MEAN_PAUSE_US,))
        thread.start()
        for _ in range(num_rooms):
            handle, posted, start = ours.write(rows, ours.arm())
            assert handle.done_time is not None  # it is final
            posts.append(posted / NUM_SPANS * 1e6)
            transfers.append((start, handle.done_time))
            begun = time.monotonic() + SETTLE_S
            time.sleep(SETTLE_S + handle.done_time - start)
            pauses.append((begun, begun + handle.done_time - start))
        sampler.stop()
        thread.join()
    moments, waits = (np.array(values) for values in sampler.samples)
    busy, idle = _within(moments, transfers), _within(moments, pauses)
    limit = WAIT_FACTOR * np.median(waits)
    return Cost(
        us_a_span=float(np.median(posts)),
        taken=float((waits[busy] > limit).mean()),
        taken_in_pauses=float((waits[idle] > limit).mean()),
        num_samples=int(busy.sum()),
        num_in_pauses=int(idle.sum()),
        transfer_s=float(np.median([end - start for start, end in transfers])),
    )


def digest_seconds(repeats: int) -> float:
    """What the digest of such a room costs each side: NUM_SPANS scattered pages. The median of `repeats`."""
    pool = _Host(np.ones(NUM_SPANS * SPAN_BYTES, dtype=np.uint8))
    runs = [(int(page) * SPAN_BYTES, SPAN_BYTES) for page in np.random.default_rng(0).permutation(NUM_SPANS)]
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        digest(pool, runs)
        times.append(time.monotonic() - start)
    return float(np.median(times))


class _Host:
    def __init__(self, bytes_: np.ndarray) -> None:
        self._bytes = bytes_

    @property
    def buffer(self) -> memoryview:
        return self._bytes.data


def _within(moments: np.ndarray, windows: list[tuple[float, float]]) -> np.ndarray:
    inside = np.zeros(len(moments), dtype=bool)
    for start, end in windows:
        inside |= (moments >= start * 1e9) & (moments <= end * 1e9)
    return inside
