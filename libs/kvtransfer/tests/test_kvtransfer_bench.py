"""The instruments of the benchmark measure what they say."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from baton.kvtransfer.bench import nixl
from baton.kvtransfer.bench._lock import LockSampler


def share_taken(work: Callable[[], None], limit_ns: int) -> float:
    """Of the moments while `work` runs in another thread for half a second: those at which the lock was not to be had within `limit_ns`."""
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
    assert len(waits) > 20
    return float((waits > limit_ns).mean())


def test_a_thread_that_holds_the_lock_is_seen_and_one_that_works_without_it_is_not() -> None:
    block = bytes(1 << 22)
    assert share_taken(lambda: sum(range(1000)), 50_000) > 0.8
    assert share_taken(lambda: hashlib.sha256(block).digest() and None, 50_000) < 0.2  # releases it while it works
    assert share_taken(lambda: time.sleep(0.01), 50_000) < 0.2


def test_why_nixl_is_left_out_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "module_name", lambda: None)
    assert nixl.why_not() == "neither nixl-cu13 nor nixl-cu12 is installed (pip install nixl-cu13)"
    monkeypatch.setattr(nixl, "module_name", lambda: "json")
    assert nixl.why_not() == "json does not import: ModuleNotFoundError: No module named 'json._api'"
