"""What a transfer costs the caller: seconds a span in `post`, and how long Python can have held its lock."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from baton.kvtransfer.bench.ours import Ours

NUM_SPANS = 10_000
SPAN_BYTES = 16 << 10
TARGET_US_A_SPAN = 1.5
TARGET_LOCKED = 0.01


@dataclass(frozen=True)
class Cost:
    """locked: processor seconds of all threads that run Python, less the native part of `post` (it copies the spans without the lock), over the
    seconds of the transfer. System calls that wake and sleep are in it although they hold no lock: it is an upper bound.
    """

    us_a_span: float
    locked: float
    transfer_s: float


def measure(transport: str, repeats: int) -> Cost:
    """NUM_SPANS scattered spans in one call; the median of `repeats` rooms."""
    order = np.random.default_rng(0).permutation(NUM_SPANS) * SPAN_BYTES
    rows = np.stack([np.arange(NUM_SPANS) * SPAN_BYTES, order, np.full(NUM_SPANS, SPAN_BYTES)], axis=1)
    posts, shares, times = [], [], []
    with Ours(transport, NUM_SPANS * SPAN_BYTES) as ours:
        for _ in range(repeats + 1):
            slot = ours.arm()
            before = _python_seconds()
            handle, posted, start = ours.write(rows, slot)
            busy = _python_seconds() - before
            assert handle.done_time is not None  # it is final
            posts.append(posted / NUM_SPANS * 1e6)
            times.append(handle.done_time - start)
            shares.append((busy - posted) / times[-1])
    return Cost(float(np.median(posts[1:])), float(np.median(shares[1:])), float(np.median(times[1:])))


def _python_seconds() -> float:
    clocks = (time.pthread_getcpuclockid(thread.ident) for thread in threading.enumerate() if thread.ident)
    return sum(time.clock_gettime(clock) for clock in clocks)
