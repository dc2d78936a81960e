"""Digests of what is sent: read while later layers are computed, there when the last one is."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from baton.engine.ports import SendDone
from baton.engine.types import Extent
from baton.kvtransfer import digest
from baton.prefill import exporter as exporter_module
from baton.workerkit import HostPageHash
from baton.workerkit.runs import digest_runs, slice_pages


class RecordingHash:
    """A page hash that keeps what it was told was complete."""

    name = HostPageHash.name

    def __init__(self, inner: HostPageHash) -> None:
        self.inner, self.told = inner, []

    def open(self, extents, first, count, heads=None):
        self.opened = (list(extents), first, count, heads)
        digest = self.inner.open(extents, first, count, heads)
        digest.ahead = lambda *told: self.told.append(told)
        return digest


def test_device_memory_is_digested_while_later_layers_are_computed(prefill, target, monkeypatch) -> None:
    """Two chunks, of which the second fills the last page of the first; the first page is resident and nobody's to digest."""
    monkeypatch.setattr(exporter_module, "LAYERS_DIGESTED_AT_ONCE", 1)
    monkeypatch.setattr(exporter_module, "_cuda_events", lambda ready: ())  # host memory here
    recording = RecordingHash(HostPageHash(prefill.layout, partial(digest, prefill.region)))
    prefill.exporter._rooms._page_hashes = [recording]
    decode = prefill.decode()
    prefill.expect(7)
    prefill.start(7)
    prefill.exporter.published(decode.publish(7, resident_tokens=4, digest=True))
    events = [[object() for _ in range(prefill.layout.num_layers)] for _ in range(2)]
    for chunk, (first, count) in enumerate(((0, 2), (1, 2))):
        for layer in range(prefill.layout.num_layers):
            prefill.exporter.layer_done(layer, [(7, first, count)], events[chunk][layer])
    prefill.exporter.finish(7, 42)
    assert isinstance(prefill.until_over(7), SendDone)
    assert recording.opened == ([Extent(5, 3)], 1, 2, None)
    assert recording.told == [
        (range(1), 0, 1, events[0][0]),
        (range(1, 2), 0, 1, events[0][1]),
        (range(1), 0, 2, events[1][0]),
        (range(1, 2), 0, 2, events[1][1]),
    ]
    prefill.until(lambda: bool(decode.bells))
    assert decode.bells[0].digest == digest(decode.region, digest_runs(target, slice_pages([Extent(20, 2), Extent(3, 1)], 1, 2), 0, 2))


class DigestReadAhead:
    """Whose value is there as soon as the last layer was read."""

    name = HostPageHash.name

    def __init__(self, last_layer: int) -> None:
        self.last_layer, self.go_on, self.threads, self.last_read = last_layer, threading.Event(), [], ""

    def open(self, extents, first, count, heads=None):
        return self

    def ahead(self, layers, first, count, ready) -> None:
        assert self.go_on.wait(5)
        if self.last_layer in layers:
            self.last_read = ready

    def is_ready(self) -> bool:
        return bool(self.last_read)

    def value(self) -> int:
        self.threads.append(threading.current_thread())
        return {"first chunk": 1, "second chunk": 2}[self.last_read]


def whole_chunk(prefill, ready: str) -> None:
    for layer in range(prefill.layout.num_layers):
        prefill.exporter.layer_done(layer, [(7, 0, 3)], ready)


@pytest.fixture
def read_ahead(prefill, monkeypatch) -> DigestReadAhead:
    monkeypatch.setattr(exporter_module, "LAYERS_DIGESTED_AT_ONCE", 1)
    monkeypatch.setattr(exporter_module, "_cuda_events", lambda ready: ())  # host memory here
    hash_ = DigestReadAhead(prefill.layout.num_layers - 1)
    prefill.exporter._rooms._page_hashes = [hash_]
    prefill.expect(7)
    prefill.start(7)
    return hash_


def published_and_read(prefill, read_ahead):
    """The decode server; the room's first chunk is computed and its digest read."""
    decode = prefill.decode()
    prefill.exporter.published(decode.publish(7, digest=True))
    read_ahead.go_on.set()
    whole_chunk(prefill, "first chunk")
    prefill.exporter._digests.submit(int).result(5)
    return decode


def test_a_digest_that_is_there_waits_for_no_thread(prefill, read_ahead) -> None:
    decode = published_and_read(prefill, read_ahead)
    hold, waited = threading.Event(), []
    prefill.exporter.on_digest(waited.append)
    prefill.exporter._digests.submit(hold.wait, 5)  # another room's digest
    prefill.exporter.finish(7, 42)
    assert isinstance(prefill.until_over(7), SendDone)
    hold.set()
    assert read_ahead.threads == [threading.current_thread()]
    assert len(waited) == 1
    assert 0 < waited[0] < 5
    prefill.until(lambda: bool(decode.bells))
    assert decode.bells[0].digest == 1


def test_a_digest_is_not_there_while_pages_that_came_again_are_to_be_read(prefill, read_ahead) -> None:
    decode = published_and_read(prefill, read_ahead)
    read_ahead.go_on.clear()
    whole_chunk(prefill, "second chunk")
    prefill.exporter.finish(7, 42)
    read_ahead.go_on.set()
    assert isinstance(prefill.until_over(7), SendDone)
    prefill.until(lambda: bool(decode.bells))
    assert decode.bells[0].digest == 2
    assert read_ahead.threads != [threading.current_thread()]
