"""The instruments of the benchmark measure what they say."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from baton.kvtransfer.bench import nixl
from baton.kvtransfer.bench._lock import LockSampler


def waits_beside(work: Callable[[], object]) -> np.ndarray:
    """Nanoseconds that the sampler waited for the lock, asking for half a second while another thread does `work` again and again."""
    ends, sampler = threading.Event(), LockSampler()

    def repeat() -> None:
        while not ends.is_set():
            work()

    worker, watcher = threading.Thread(target=repeat), threading.Thread(target=sampler.run, args=(30,))
    worker.start()
    watcher.start()
    time.sleep(0.5)
    ends.set()
    sampler.stop()
    worker.join()
    watcher.join()
    moments, waits = (np.array(values) for values in sampler.samples)
    assert (np.diff(moments) > 0).all()
    return waits


def test_a_thread_that_holds_the_lock_is_seen_and_one_that_works_without_it_is_not() -> None:
    block = bytes(1 << 22)
    holding = ctypes.PyDLL(None)  # its calls keep the lock
    assert waits_beside(lambda: holding.usleep(200_000)).max() > 100e6
    for work in (lambda: hashlib.sha256(block).digest(), lambda: time.sleep(0.01)):  # both release it while they take their time
        waits = waits_beside(work)
        assert len(waits) > 20
        assert (waits > 50_000).mean() < 0.2


def test_why_nixl_is_left_out_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "module_name", lambda: None)
    assert nixl.why_not() == "neither nixl-cu13 nor nixl-cu12 is installed (pip install nixl-cu13)"
    monkeypatch.setattr(nixl, "module_name", lambda: "json")
    assert nixl.why_not() == "json does not import: ModuleNotFoundError: No module named 'json._api'"
