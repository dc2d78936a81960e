"""Digests of what has landed: prepared when a room is published, begun by its doorbell, compared before it joins."""

from __future__ import annotations

import threading

import pytest
from decode_half import GONE, LAYOUT, PAGES, Decode

from baton.decode.sampling import SAMPLE_ONE_IN, DigestSampler
from baton.kvtransfer import digest
from baton.workerkit import HostPageHash
from baton.workerkit.runs import digest_runs


def test_the_digest_is_compared(make_decode) -> None:
    decode = make_decode("all")
    value = digest(decode.source, digest_runs(LAYOUT, PAGES, 0, 3))
    for room, more in ((7, {"digest": value, "has_digest": True}), (8, {"digest": value ^ 1, "has_digest": True}), (9, {})):
        decode.publish(room)
        assert decode.published(room).digest
        decode.write(room, **more)
    decode.until(("Landed", 7), ("Freed", 8), ("Freed", 9))
    assert (decode.failure(8).code, decode.failure(8).cause, decode.failure(8).origin) == ("DATA_LOSS", "digest_mismatch", "transfer")
    assert decode.failure(9).cause == "digest_missing"


def test_one_room_in_some_is_sampled() -> None:
    assert [DigestSampler("sample").wants(room) for room in range(2 * SAMPLE_ONE_IN)].count(True) == 2
    assert not DigestSampler("off").wants(SAMPLE_ONE_IN)


def test_an_abort_while_the_digest_is_computed(make_decode, monkeypatch) -> None:
    decode = make_decode("all")
    hold, inside = threading.Event(), threading.Event()
    real = decode.importer._compare

    def slow(landing) -> None:
        inside.set()
        hold.wait(5)
        real(landing)

    monkeypatch.setattr(decode.importer, "_compare", slow)
    decode.publish(7)
    decode.write(7)
    assert inside.wait(5)
    decode.importer.abort(7, GONE)
    assert decode.names() == [("Published", 7), ("Freed", 7)]
    hold.set()
    decode.settle()
    assert decode.names() == [("Published", 7), ("Freed", 7)]
    assert decode.revokes() == [], "the bell was the writer's last write: there is nothing to revoke"


class RecordingHash:
    """Keeps what is asked of it, in order, and by which thread."""

    name = HostPageHash.name

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.threads: dict[str, str] = {}

    def _tell(self, what: str, *arguments: object) -> None:
        self.told.append((what, *arguments))
        self.threads[what] = threading.current_thread().name

    def open(self, extents, first, count, heads=None):
        self._tell("open", list(extents), first, count, heads)
        return self

    def prepare(self) -> None:
        self._tell("prepare")

    def ahead(self, layers, first, count, ready) -> None:
        self._tell("ahead", layers, first, count, ready)

    def value(self) -> int:
        self._tell("value")
        return 11


@pytest.fixture
def recording(make_decode) -> tuple[Decode, RecordingHash]:
    decode, hash_ = make_decode("all"), RecordingHash()
    decode.importer._page_hashes = [hash_]
    return decode, hash_


def test_a_digest_is_prepared_when_its_room_is_published_and_begun_by_the_doorbell(recording) -> None:
    decode, hash_ = recording
    waited: list[float] = []
    decode.importer.on_digest(waited.append)
    decode.publish(7, resident_pages=1)
    decode.importer._checks.submit(int).result(5)
    assert hash_.told == [("open", list(PAGES), 1, 2, None), ("prepare",)]
    decode.write(7, digest=11, has_digest=True)
    decode.until(("Landed", 7))
    assert hash_.told[2:] == [("ahead", range(LAYOUT.num_layers), 0, 2, None), ("value",)]
    decode.importer._checks.submit(int).result(5)
    assert len(waited) == 1
    assert 0 < waited[0] < 5
    assert hash_.threads["prepare"] == hash_.threads["value"] != hash_.threads["ahead"]


def test_a_room_that_lands_before_its_digest_is_prepared_waits_for_it(recording) -> None:
    decode, hash_ = recording
    hold = threading.Event()
    decode.importer._checks.submit(hold.wait, 5)
    decode.publish(7)
    decode.write(7, digest=12, has_digest=True)
    decode.settle()
    assert decode.names() == [("Published", 7)]
    hold.set()
    decode.until(("Freed", 7))
    assert decode.failure(7).cause == "digest_mismatch"
    assert [what for what, *_ in hash_.told] == ["open", "prepare", "value"]


@pytest.mark.parametrize("at", ["open", "prepare", "ahead", "value"])
def test_a_digest_that_fails_ends_its_room_by_name(recording, at, monkeypatch) -> None:
    decode, hash_ = recording

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory on the device")

    monkeypatch.setattr(hash_, at, fails)
    decode.publish(7)
    decode.importer._checks.submit(int).result(5)
    decode.write(7, digest=11, has_digest=True)
    decode.until(("Freed", 7))
    assert decode.failure(7).cause == "digest_failed"
    assert "out of memory on the device" in decode.failure(7).message
    assert ("Landed", 7) not in decode.names()
    monkeypatch.undo()
    decode.publish(8)  # the next one is well
    decode.write(8, digest=11, has_digest=True)
    decode.until(("Landed", 8))


def test_the_digest_of_a_room_that_is_over_is_not_prepared(recording) -> None:
    decode, hash_ = recording
    hold = threading.Event()
    decode.importer._checks.submit(hold.wait, 5)
    decode.publish(7)
    decode.importer.abort(7, GONE)
    decode.importer.quiesced(7, decode.published(7).lease_generation)
    assert decode.names()[-1] == ("Freed", 7)
    hold.set()
    decode.importer._checks.submit(int).result(5)
    assert hash_.told == []
