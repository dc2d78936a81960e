"""The pages of one sequence, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.types import Extent


class PageTable:
    """A list of extents with adjacent ones merged: most sequences have a single one, and are then one run of memory."""

    __slots__ = ("extents", "num_pages")

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self.num_pages = 0

    def append(self, extent: Extent) -> None:
        self.num_pages += extent.count
        if self.extents and self.extents[-1].end == extent.first:
            last = self.extents[-1]
            self.extents[-1] = Extent(last.first, last.count + extent.count)
        else:
            self.extents.append(extent)

    def clear(self) -> list[Extent]:
        """Empties the table and returns what it held."""
        extents, self.extents, self.num_pages = self.extents, [], 0
        return extents

    def page(self, place: int) -> int:
        """The page of the tokens [place * page_size, (place + 1) * page_size)."""
        for extent in self.extents:
            if place < extent.count:
                return extent.first + place
            place -= extent.count
        raise AssertionError(f"page number {place} lies beyond the {self.num_pages} pages of the table")

    def runs(self, start: int, count: int, page_size: int) -> Iterator[tuple[int, int]]:
        """(first slot, number of slots) of tokens [start, start + count). A slot is page * page_size + offset in the page."""
        for extent in self.extents:
            size = extent.count * page_size
            if start < size:
                length = min(count, size - start)
                yield extent.first * page_size + start, length
                count -= length
                if not count:
                    return
                start = 0
            else:
                start -= size
        raise AssertionError(f"{count} tokens lie beyond the {self.num_pages} pages of the table")
