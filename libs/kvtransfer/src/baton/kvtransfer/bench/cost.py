"""What a transfer costs the caller: seconds a span in `post`, and the share of its time in which Python's lock is taken.

How the lock is measured: a native thread asks for it at random moments, about every 80 us, and what matters is whether it had to wait. At moments
that do not depend on what happens, the share of moments at which the lock is taken is the share of time in which it is. A wait counts when it is
longer than all but one in a thousand while the process sleeps, so one in a thousand is the floor of what this can show. Everything that runs Python
in this process counts: the caller, the thread that calls back, and this measurement's own handling of its rooms. A sampler that lost the processor
while it asked counts too, so that a busy machine shows more than there is.
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
TARGET_WAKE_S = 50e-6
MEAN_PAUSE_US = 30
QUIET_S = 1.0
FLOOR = 0.001


@dataclass(frozen=True)
class Cost:
    """locked, error: share of the transfers' time with Python's lock taken, and the standard error of that share. num_samples: asked so often.
    transfer_s: of one room."""

    us_a_span: float
    locked: float
    error: float
    num_samples: int
    transfer_s: float


def measure(transport: str, num_rooms: int) -> Cost:
    """NUM_SPANS scattered spans in one call, `num_rooms` times."""
    order = np.random.default_rng(0).permutation(NUM_SPANS) * SPAN_BYTES
    rows = np.stack([np.arange(NUM_SPANS) * SPAN_BYTES, order, np.full(NUM_SPANS, SPAN_BYTES)], axis=1)
    posts, windows = [], []
    with Ours(transport, NUM_SPANS * SPAN_BYTES) as ours:
        ours.write(rows, ours.arm())  # warm
        sampler = LockSampler()
        thread = threading.Thread(target=sampler.run, args=(MEAN_PAUSE_US,))
        thread.start()
        quiet = (time.monotonic(), time.monotonic() + QUIET_S)
        time.sleep(QUIET_S)
        for _ in range(num_rooms):
            handle, posted, start = ours.write(rows, ours.arm())
            assert handle.done_time is not None  # it is final
            posts.append(posted / NUM_SPANS * 1e6)
            windows.append((start, handle.done_time))
        sampler.stop()
        thread.join()
    moments, waits = (np.array(values) for values in sampler.samples)
    idle, busy = _within(moments, [quiet]), _within(moments, windows)
    limit = np.quantile(waits[idle], 1 - FLOOR)
    locked = float((waits[busy] > limit).mean())
    return Cost(
        us_a_span=float(np.median(posts)),
        locked=locked,
        error=float(np.sqrt(locked * (1 - locked) / busy.sum())),
        num_samples=int(busy.sum()),
        transfer_s=float(np.median([end - start for start, end in windows])),
    )


def wake_seconds(transport: str, num_rooms: int = 300) -> float:
    """From `post` to the first put of a queue that sleeps; the median."""
    rows = np.array([[0, 0, 64]], dtype=np.int64)
    waits = []
    with Ours(transport, 4096) as ours:
        for _ in range(num_rooms):
            slot = ours.arm()
            time.sleep(0.002)  # it has gone to sleep
            handle, _, start = ours.write(rows, slot)
            assert handle.first_post_time is not None  # it is final
            waits.append(handle.first_post_time - start)
    return float(np.median(waits))


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
