"""A prefill and a decode engine, joined in memory."""

from __future__ import annotations

import torch
from engine_reference import answers, assert_all_free, engine, run

from baton.engine import Role
from baton.engine.testing import MemoryLink, Side
from baton.engine.types import Token


class Pair:
    """A prefill and a decode engine over memory handed in from outside, poisoned with NaN."""

    def __init__(self, model, prefill_pages: int = 64, decode_pages: int = 64, **settings) -> None:
        shapes = [engine(model, num_pages=num_pages, **settings).layout for num_pages in (prefill_pages, decode_pages)]
        self.memories = [torch.full((shape.pool_bytes // 4,), float("nan")) for shape in shapes]
        views = [memoryview(memory.numpy()).cast("B") for memory in self.memories]
        self.link = MemoryLink(*(Side(view, shape) for view, shape in zip(views, shapes, strict=True)))
        self.prefill = engine(model, Role.PREFILL, num_pages=prefill_pages, exporter=self.link.exporter, buffer=views[0], **settings)
        self.decode = engine(model, Role.DECODE, num_pages=decode_pages, importer=self.link.importer, buffer=views[1], **settings)

    def add(self, *requests) -> None:
        for each in requests:
            self.prefill.add(each)
            self.decode.add(each)

    def run(self):
        return run(self.prefill, self.decode)

    def assert_clean(self) -> None:
        assert_all_free(self.prefill, self.decode)
        assert self.link.open_rooms() == []


def legs(events):
    """Decode's tokens start at 1; prefill's is 0: in order of time they are one stream."""
    return answers(sorted((event for event in events if isinstance(event, Token)), key=lambda event: (event.room, event.index)))
