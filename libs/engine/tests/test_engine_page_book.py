"""A pool that is full of cached pages: what an answer is given is still in few pieces, and nothing of the pool is lost."""

from __future__ import annotations

import random

import pytest

from baton.engine.allocator import PageAllocator
from baton.engine.page_book import PageBook
from baton.engine.prefix_tree import PrefixTree
from baton.engine.scheduling.sequence import Sequence
from baton.engine.types import Request, SamplingParams

PAGE, NUM_PAGES, ROWS, MOST_HEADROOM = 16, 800, 8, 32


def headroom(sequence: Sequence) -> int:
    left = sequence.request.sampling.max_tokens - sequence.num_answered
    return min(MOST_HEADROOM, -(-left // PAGE))


class Pool:
    """Sequences of any length come, grow page by page in any order, and end."""

    def __init__(self, tree: PrefixTree | None) -> None:
        self.book = PageBook(PageAllocator(NUM_PAGES), tree)
        self.live: list[Sequence] = []
        self.num_pieces: list[int] = []
        self._draw = random.Random(3)
        self._num_rooms = 0

    def run(self, num_sequences: int) -> None:
        while len(self.num_pieces) < num_sequences:
            while len(self.live) < ROWS and self._admit():
                pass
            sequence = self._draw.choice(self.live)
            sequence.tokens += self._tokens(PAGE)
            missing = -(-len(sequence.tokens) // PAGE) - sequence.pages.num_pages
            if sequence.num_answered >= sequence.request.sampling.max_tokens or not self.book.grow(sequence, missing, headroom(sequence)):
                self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.num_pieces.append(len(sequence.pages.extents))
        self.book.keep(sequence, min(len(sequence.tokens), sequence.pages.num_pages * PAGE))
        self.book.release(sequence)
        self.live.remove(sequence)

    def _admit(self) -> bool:
        self._num_rooms += 1
        prompt = self._tokens(self._draw.randrange(1, 800))
        request = Request(self._num_rooms, prompt, SamplingParams(max_tokens=self._draw.randrange(1, 400)))
        sequence, needed = Sequence(request, list(prompt)), -(-len(prompt) // PAGE)
        if needed + headroom(sequence) > self.book.num_free:
            return False
        self.book.admit(sequence, needed, headroom(sequence))
        self.book.keep(sequence, len(prompt))
        self.live.append(sequence)
        return True

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(50_000) for _ in range(count)]


@pytest.mark.parametrize("caches", [False, True])
def test_answers_stay_in_few_pieces(caches: bool) -> None:
    """Evicted one page at a time, as they are asked for, pages come from everywhere: 30 pieces an answer."""
    pool = Pool(PrefixTree(PAGE) if caches else None)
    pool.run(300)
    assert sum(pool.num_pieces[50:]) / len(pool.num_pieces[50:]) < 4
    assert pool.book.num_free_cached > NUM_PAGES / 10 if caches else not pool.book.num_free_cached
    for sequence in list(pool.live):
        pool.end(sequence)
    assert pool.book.num_free == NUM_PAGES
    pool.book.clear()
    assert (pool.book.num_free, pool.book.num_free_cached, pool.book.num_cached) == (NUM_PAGES, 0, 0)
