"""How soon a transfer queue that sleeps is at work, beside what the machine takes to wake anybody."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from baton.kvtransfer.bench.ours import Ours

TARGET_S = 50e-6
#: Long enough for whoever waits to have gone to sleep.
PAUSE_S = 0.002


def queue_seconds(transport: str, num_rooms: int = 300) -> float:
    """From `post` to the first put of a queue that sleeps; the median."""
    rows = np.array([[0, 0, 64]], dtype=np.int64)
    waits = []
    with Ours(transport, 4096) as ours:
        for _ in range(num_rooms):
            slot = ours.arm()
            time.sleep(PAUSE_S)
            handle, _, start = ours.write(rows, slot)
            assert handle.first_post_time is not None  # it is final
            waits.append(handle.first_post_time - start)
    return float(np.median(waits))


def floor_seconds(num_times: int = 300) -> float:
    """The same for a process that does nothing but wait for a byte: the kernel's and the processor's part. The median."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_wait, args=(theirs, num_times), daemon=True)
    process.start()
    theirs.close()
    ours.recv()  # it is there
    waits = []
    for _ in range(num_times):
        time.sleep(PAUSE_S)
        start = time.monotonic()
        ours.send_bytes(b".")
        waits.append(ours.recv() - start)
    process.join()
    return float(np.median(waits))


def _wait(pipe: Connection, num_times: int) -> None:
    pipe.send(time.monotonic())
    for _ in range(num_times):
        pipe.recv_bytes()
        pipe.send(time.monotonic())
