"""Chunks from static buffers, padded, beside the same chunks as they are; captured where BATON_ENGINE_DEVICE names a GPU."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from engine_reference import prompts, request

from baton.engine import EngineConfig, load_model_config, plan_layout
from baton.engine.device.chunk import Chunk, chunk_of
from baton.engine.device.chunk_graphs import MAX_SEQUENCES, SIZES, ChunkGraphs, chunk_sizes
from baton.engine.device.model import DeviceModel
from baton.engine.device.prompts import Prompts
from baton.engine.given_up import GivenUp
from baton.engine.page_table import PageTable
from baton.engine.pool import KVPool
from baton.engine.scheduling.sequence import Sequence, Slice
from baton.engine.types import Extent
from baton.engine.weights import WeightReader

DEVICE = torch.device(os.environ.get("BATON_ENGINE_DEVICE", "cpu"))
PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 4, 128, 3


@pytest.fixture(autouse=True)
def plain_twins(monkeypatch):
    """Not Triton's interpreter, which libs/conftest.py turns on for the kernels' own tests."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="module")
def model(tiny):
    with torch.inference_mode(), WeightReader(tiny.folder, torch.float32) as reader:
        return DeviceModel(load_model_config(tiny.folder), reader, torch.float32, DEVICE)


@pytest.fixture(params=[True, False], ids=["by layer", "whole"])
def by_layer(request):
    return request.param


class Side:
    """A pool, poisoned with NaN, and the prompts that are written into it."""

    def __init__(self, model, *, captured: bool, by_layer: bool = True, deterministic: bool = False) -> None:
        layout = plan_layout(model.config, EngineConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32"))
        self.pool = KVPool(layout, torch.float32, device=DEVICE)
        self.pool.planes.fill_(float("nan"))
        on_gpu = DEVICE.type == "cuda"
        graphs = None
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)) if on_gpu else nullcontext():
            if captured:
                graphs = ChunkGraphs(model, self.pool, chunk_sizes(64), 40, by_layer=by_layer, deterministic=deterministic, capture=on_gpu)
                graphs.prepare()
                self.pool.planes.fill_(float("nan"))
            if on_gpu:
                torch.cuda.synchronize()
        self.graphs = graphs
        self.layers: list[int] = []
        self._prompts = Prompts(model, self.pool, graphs, deterministic=deterministic)

    def run(self, slices, given_up=None):
        found = self._prompts.run(slices, self.layers.append, given_up)
        return None if found is None else found.tokens.tolist()


def sequences(lengths):
    """Of random prompts, in pages that lie apart."""
    found = []
    for room, tokens in enumerate(prompts(lengths, seed=5), start=1):
        pages = PageTable()
        for index in range(-(-len(tokens) // PAGE_SIZE)):
            pages.append(Extent((7 * room + 31 * index) % NUM_PAGES, 1))
        found.append(Sequence(request(room, tokens), tokens, pages=pages))
    return found


def passes(first, second, third):
    """A fresh prompt, one behind what an earlier pass computed, and one that is not whole yet; each twice as large as the other at some time."""
    yield [Slice(second, 0, 30, samples=False)]
    yield [Slice(first, 0, 5, samples=True), Slice(second, 30, 7, samples=True), Slice(third, 0, 11, samples=False)]
    yield [Slice(third, 11, 1, samples=True)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_chunk_is_the_launched_one(model, by_layer, deterministic):
    ours = Side(model, captured=True, by_layer=by_layer, deterministic=deterministic)
    theirs = Side(model, captured=False, deterministic=deterministic)
    for slices in passes(*sequences([5, 37, 12])):
        assert ours.graphs.takes(chunk_of(slices, PAGE_SIZE))
        assert ours.run(slices) == theirs.run(slices)
        torch.testing.assert_close(ours.pool.planes, theirs.pool.planes, equal_nan=True)
    assert theirs.layers == [*range(NUM_LAYERS)] * 3
    cut = by_layer or DEVICE.type == "cpu"
    assert ours.layers == (theirs.layers if cut else [NUM_LAYERS - 1] * 3), "nothing listens between the layers of a role without an exporter"


def test_what_does_not_fit_is_launched(model):
    side = Side(model, captured=True)
    many = [Slice(each, 0, 2, samples=True) for each in sequences([2] * (MAX_SEQUENCES + 1))]
    long = [Slice(sequences([65])[0], 0, 65, samples=True)]
    for slices in (many, long):
        assert not side.graphs.takes(chunk_of(slices, PAGE_SIZE))
        assert len(side.run(slices)) == len(slices)
    assert side.graphs.takes(chunk_of(many[1:], PAGE_SIZE))
    assert len(side.run(many[1:])) == MAX_SEQUENCES


def test_a_pass_that_nobody_wants_leaves_between_layers(model):
    side = Side(model, captured=True)
    piece = Slice(sequences([20])[0], 0, 20, samples=True)
    asked = []

    class Ending(dict):
        def __contains__(self, room: object) -> bool:
            asked.append(room)
            return len(asked) > 1

    given_up = GivenUp([1], Ending())
    assert side.run([piece], given_up) is None
    assert (given_up.at, side.layers) == (1, [0])
    assert len(side.run([piece])) == 1
    assert side.layers == [0, 0, 1, 2]


def test_sizes():
    assert chunk_sizes(1) == [16]
    assert chunk_sizes(16) == [16]
    assert chunk_sizes(17) == [16, 32]
    assert chunk_sizes(400) == [*SIZES[: SIZES.index(448) + 1]]
    assert chunk_sizes(100_000) == [*SIZES]
    assert Chunk().num_rows == 0
