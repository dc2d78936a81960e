"""Which pages of the pool are free. Pure: no memory is touched here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable

from baton.engine.page_table import PageTable
from baton.engine.types import Extent


class PageAllocator:
    """Hands out pages in as few extents as possible, and leaves air behind a sequence that is still growing.

    One extent is one run of bytes a layer: attention reads it without a gather, and the transfer library posts it as one put.
    `headroom` is a soft claim on the pages behind an extent: others are placed elsewhere while there is an elsewhere.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        # Free runs, sorted by first page, never adjacent. _claims: first page of a free run -> pages its left neighbour hopes to grow into.
        self._firsts: list[int] = [0] if num_pages else []
        self._counts: dict[int, int] = {0: num_pages} if num_pages else {}
        self._claims: dict[int, int] = {}

    def allocate(self, table: PageTable, count: int, headroom: int = 0) -> bool:
        """Appends `count` pages to `table`, at its end where that is free. False, and nothing changed, when fewer are free.

        headroom: pages that this sequence is likely to ask for later.
        """
        if count > self.num_free:
            return False
        count -= self._grow_in_place(table, count)
        while count:
            first, length = self._place(count, headroom)
            self._take(first, length)
            table.append(Extent(first, length))
            count -= length
        if table.extents:
            self._claim(table.extents[-1].end, headroom)
        return True

    def has_place(self, table: PageTable, count: int, headroom: int = 0) -> bool:
        """Whether `allocate` would find `count` pages in one piece, at the table's end or with the headroom behind them, without touching what others
        are likely to ask for."""
        if table.extents and self._counts.get(table.extents[-1].end, 0) >= count:
            return True
        return any(length - min(length, self._claims.get(first, 0)) >= count + headroom for first, length in self._counts.items())

    def free(self, table: PageTable, kept: Container[int] = ()) -> None:
        """Takes all pages of `table` back, but for those that somebody else keeps, and empties it."""
        for extent in table.clear():
            self._claims.pop(extent.end, None)
            if not kept:
                self._give_back(extent.first, extent.count)
            else:
                self.free_pages(page for page in range(extent.first, extent.end) if page not in kept)

    def free_pages(self, pages: Iterable[int]) -> None:
        """Takes single pages back: neighbours that come one after the other, upwards or downwards, at once."""
        first = end = 0
        for page in pages:
            if page == end and first < end:
                end += 1
            elif page == first - 1 and first < end:
                first -= 1
            else:
                if first < end:
                    self._give_back(first, end - first)
                first, end = page, page + 1
        if first < end:
            self._give_back(first, end - first)

    def free_runs(self) -> list[tuple[int, int]]:
        """(first page, number of pages) of every free run, for tests and statistics."""
        return [(first, self._counts[first]) for first in self._firsts]

    def _grow_in_place(self, table: PageTable, count: int) -> int:
        if not table.extents:
            return 0
        end = table.extents[-1].end
        room = min(count, self._counts.get(end, 0))
        if room:
            self._take(end, room)
            table.append(Extent(end, room))
        return room

    def _place(self, count: int, headroom: int) -> tuple[int, int]:
        """Where the next extent goes: (first page, number of pages)."""
        roomy = snug = whole = None
        largest = -1
        for first in self._firsts:
            length = self._counts[first]
            unclaimed = length - min(length, self._claims.get(first, 0))
            if unclaimed >= count + headroom and (roomy is None or unclaimed < roomy[0]):
                roomy = (unclaimed, first)
            if unclaimed >= count and (snug is None or unclaimed > snug[0]):
                snug = (unclaimed, first)
            if length >= count and (whole is None or length > whole[0]):
                whole = (length, first)
            if largest < 0 or length > self._counts[largest]:
                largest = first
        for choice in (roomy, snug):
            if choice is not None:
                unclaimed, first = choice
                return first + self._counts[first] - unclaimed, count
        if whole is not None:
            # Everything is claimed: halve the slack, so that both neighbours can still grow.
            length, first = whole
            return first + (length - count) // 2, count
        return largest, min(count, self._counts[largest])

    def _claim(self, first: int, headroom: int) -> None:
        if headroom and first in self._counts:
            self._claims[first] = headroom

    def _take(self, first: int, count: int) -> None:
        index = bisect_left(self._firsts, first + 1) - 1
        start = self._firsts[index]
        length = self._counts.pop(start)
        assert start <= first <= start + length - count, "pages are taken from one free run"
        del self._firsts[index]
        if first > start:
            self._firsts.insert(index, start)
            self._counts[start] = first - start
            index += 1
        else:
            self._claims.pop(start, None)
        if first + count < start + length:
            self._firsts.insert(index, first + count)
            self._counts[first + count] = start + length - first - count
        self.num_free -= count

    def _give_back(self, first: int, count: int) -> None:
        index = bisect_left(self._firsts, first)
        self.num_free += count
        end = first + count
        assert index == len(self._firsts) or end <= self._firsts[index], f"pages {first}..{end} were already free"
        if index < len(self._firsts) and self._firsts[index] == end:
            count += self._counts.pop(end)
            del self._firsts[index]
        if index and self._firsts[index - 1] + self._counts[self._firsts[index - 1]] >= first:
            before = self._firsts[index - 1]
            assert before + self._counts[before] == first, f"page {first} was already free"
            self._counts[before] += count
        else:
            self._firsts.insert(index, first)
            self._counts[first] = count
