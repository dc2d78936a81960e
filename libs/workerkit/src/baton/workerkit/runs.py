"""Which bytes of a pool are one room's KV, in the one order in which both sides digest them."""

from __future__ import annotations

from collections.abc import Iterable

from baton.engine.layout import KVLayout
from baton.engine.types import Extent


def digest_runs(layout: KVLayout, extents: Iterable[Extent], first: int, count: int) -> list[tuple[int, int]]:
    """(offset, num_bytes) runs of pages [first, first + count) of a prompt, whole pages: layer by layer, keys before values, in prompt order.

    How the pages are scattered changes where runs are cut, not the bytes or their order: equal KV gives equal digests on both sides.
    """
    pages = slice_pages(extents, first, count)
    return [
        (layout.offset(layer, values, run.first), run.count * layout.page_bytes)
        for layer in range(layout.num_layers)
        for values in (False, True)
        for run in pages
    ]


def slice_pages(extents: Iterable[Extent], first: int, count: int) -> list[Extent]:
    """The runs that hold pages [first, first + count) of the prompt. Raises ValueError when there are fewer pages."""
    runs: list[Extent] = []
    position, end = 0, first + count
    for extent in extents:
        begin = max(first - position, 0)
        stop = min(end - position, extent.count)
        if begin < stop:
            runs.append(Extent(extent.first + begin, stop - begin))
        position += extent.count
    if position < end:
        raise ValueError(f"pages [{first}, {end}) asked for, but the extents hold {position} pages")
    return runs
