"""The digest of pages where the device has them: its plain twin, and where BATON_ENGINE_DEVICE names a GPU that beside it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from baton.engine import KVLayout, KVPool
from baton.engine.device.page_hash import NUM_STREAMS, DevicePageHash, blocks
from baton.engine.types import Extent

SMALL = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, num_pages=16, itemsize=2)
LARGE = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, num_pages=40, itemsize=2)

DEVICE = torch.device(os.environ.get("BATON_ENGINE_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def plain_twins(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def filled(layout: KVLayout, seed: int) -> KVPool:
    pool = KVPool(layout, torch.bfloat16)
    pool.planes.copy_(torch.randn(pool.planes.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def copied(source: KVPool, target: KVPool, pages: list[int], places: list[int]) -> None:
    for layer in range(source.layout.num_layers):
        for ours, theirs in zip(source.pages(layer), target.pages(layer), strict=True):
            theirs[places] = ours[pages]


def test_equal_pages_in_other_places_of_another_pool_have_one_digest():
    source, target = filled(SMALL, 1), filled(LARGE, 2)
    copied(source, target, [4, 5, 9], [30, 2, 3])
    there = DevicePageHash(target).of([Extent(30, 1), Extent(2, 2)], 0, 3)
    assert DevicePageHash(source).of([Extent(4, 2), Extent(9, 1)], 0, 3) == there
    assert 0 <= there < 1 << 64
    # a part of them, the leading page being resident
    assert DevicePageHash(source).of([Extent(4, 2), Extent(9, 1)], 1, 2) == DevicePageHash(target).of([Extent(30, 1), Extent(2, 2)], 1, 2) != there


@pytest.mark.parametrize("where", [(0, 0, 0), (2, 1, 2)], ids=["first layer's keys", "last layer's values"])
def test_one_changed_bit_and_two_swapped_pages_are_seen(where):
    layer, kind, page = where
    source, target = filled(SMALL, 1), filled(SMALL, 2)
    copied(source, target, [0, 1, 2], [0, 1, 2])
    before = DevicePageHash(target).of([Extent(0, 3)], 0, 3)
    assert before == DevicePageHash(source).of([Extent(0, 3)], 0, 3)
    assert DevicePageHash(target).of([Extent(1, 1), Extent(0, 1), Extent(2, 1)], 0, 3) != before
    target.pages(layer)[kind][page, 3, 1].view(torch.int16)[7] ^= 1
    assert DevicePageHash(target).of([Extent(0, 3)], 0, 3) != before


def test_more_pages_than_there_are():
    with pytest.raises(ValueError, match="hold 2 pages"):
        DevicePageHash(filled(SMALL, 1)).of([Extent(0, 2)], 1, 2)


def test_what_is_read_ahead_counts_as_it_was_last_said_to_be_complete():
    pool, extents = filled(SMALL, 3), [Extent(7, 2), Extent(2, 3)]
    digest = DevicePageHash(pool).open(extents, 1, 4)
    for layer in range(SMALL.num_layers):
        for values in pool.pages(layer):
            values[2] += 1  # page 1 of the four: filled further by the next chunk
    digest.ahead(range(2), 0, 2, None)
    for layer in range(SMALL.num_layers):
        for values in pool.pages(layer):
            values[2] -= 1
    digest.ahead(range(2), 1, 3, None)
    digest.ahead(range(2, 3), 1, 1, None)
    assert digest.value() == DevicePageHash(pool).of(extents, 1, 4)
    pool.pages(0)[0][3] += 1  # read ahead already
    assert digest.value() != DevicePageHash(pool).of(extents, 1, 4)
    pool.pages(0)[0][3] -= 1
    some = DevicePageHash(pool).open(extents, 1, 4, (1, 1))
    some.ahead(range(3), 0, 4, None)
    assert some.value() == DevicePageHash(pool).of(extents, 1, 4, (1, 1)) != DevicePageHash(pool).of(extents, 1, 4, (0, 1))


def test_a_digest_is_ready_once_every_page_was_read_ahead_and_until_one_comes_again():
    pool, extents = filled(SMALL, 3), [Extent(7, 2), Extent(2, 3)]
    digest = DevicePageHash(pool).open(extents, 1, 4)
    digest.prepare()
    digest.prepare()
    digest.ahead(range(2), 0, 4, None)
    assert not digest.is_ready()
    digest.ahead(range(2, 3), 0, 4, None)
    assert digest.is_ready()
    before = digest.value()
    pool.pages(2)[0][2] += 1
    assert digest.value() == before, "nothing is read twice"
    digest.ahead(range(2, 3), 1, 1, None)
    assert digest.is_ready()
    assert digest.value() == DevicePageHash(pool).of(extents, 1, 4) != before
    nothing = DevicePageHash(pool).open(extents, 5, 0)
    nothing.prepare()
    assert nothing.is_ready()
    assert nothing.value() == 0


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["1111", "1111"], [(0, 2, 0, 4)]),
        (["0000", "0000"], []),
        (["1001", "1001", "0001"], [(0, 2, 0, 1), (0, 2, 3, 4), (2, 3, 3, 4)]),
        (["0110", "1111", "0110"], [(0, 1, 1, 3), (1, 2, 0, 4), (2, 3, 1, 3)]),
    ],
)
def test_what_is_left_is_read_in_blocks(wanted, found):
    assert blocks(np.array([[cell == "1" for cell in row] for row in wanted])) == found


@pytest.mark.skipif(DEVICE.type != "cuda", reason="BATON_ENGINE_DEVICE names no GPU")
@pytest.mark.parametrize("heads", [None, (1, 1)])
def test_a_gpu_reads_pages_when_they_are_complete_for_whichever_thread_asks(heads):
    host, pool, extents = filled(LARGE, 4), KVPool(LARGE, torch.bfloat16, device=DEVICE), [Extent(30, 1), Extent(2, 2)]
    planes, stream = host.planes.to(DEVICE), torch.cuda.Stream(DEVICE)
    pool.planes.zero_()
    torch.cuda.synchronize(DEVICE)
    digest = DevicePageHash(pool).open(extents, 0, 3, heads)
    digest.prepare()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms
        pool.planes.copy_(planes)
        ready = torch.cuda.Event()
        ready.record(stream)
    with ThreadPoolExecutor(1) as threads:  # a new thread has no context yet
        threads.submit(digest.ahead, range(3), 0, 3, ready).result()
        assert not digest.is_ready()
        expected = DevicePageHash(host).of(extents, 0, 3, heads)
        assert threads.submit(digest.value).result() == expected
    assert digest.is_ready()
    assert digest.value() == expected
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(DevicePageHash(pool).of, extents, 0, 3, heads).result() == expected


@pytest.mark.skipif(DEVICE.type != "cuda", reason="BATON_ENGINE_DEVICE names no GPU")
def test_no_digest_is_on_the_engines_stream():
    engines, hash_ = torch.cuda.Stream(DEVICE), DevicePageHash(KVPool(SMALL, torch.bfloat16, device=DEVICE))
    taken = [hash_.open([Extent(0, 1)], 0, 1)._stream.cuda_stream for _ in range(100)]
    assert engines.cuda_stream not in taken
    assert len(set(taken)) == NUM_STREAMS
