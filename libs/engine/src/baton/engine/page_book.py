"""Whose every page of the pool is: free, a sequence's own, or the prefix tree's, which sequences share."""

from __future__ import annotations

from baton.engine.allocator import PageAllocator
from baton.engine.prefix_tree import PrefixTree, PrefixWatcher
from baton.engine.scheduling.sequence import Sequence
from baton.engine.types import Extent

#: Pages that are evicted between two looks at whether that is enough.
EVICTED_AT_ONCE = 16


class PageBook:
    """Gives sequences their pages: leading ones that the tree already has, which are never written again, and own ones behind them.

    A page of the tree that nobody holds counts as free: it is given back before any allocation fails. Without a tree (None) this is the allocator
    and nothing more; nothing is shared then, forks of a prompt compute it again.

    caches: what has ended is found again. Where that is off only forks find something: the prompt of the room that they are forks of.
    """

    def __init__(self, allocator: PageAllocator, tree: PrefixTree | None = None, *, caches: bool = True) -> None:
        self._allocator = allocator
        self._tree = tree
        self._caches = caches and tree is not None
        #: Tokens that were asked for when sequences came, those of them that were here, and pages that the tree gave back under pressure.
        self.num_asked_tokens = 0
        self.num_found_tokens = 0
        self.num_evicted_pages = 0

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return self._allocator.num_free + (self._tree.num_evictable if self._tree is not None else 0)

    @property
    def num_cached(self) -> int:
        """Pages of the tree, held or not."""
        return len(self._tree) if self._tree is not None else 0

    @property
    def num_free_cached(self) -> int:
        """Of the free ones, those that are found again until they are allocated."""
        return self._tree.num_evictable if self._caches and self._tree is not None else 0

    @property
    def num_shared(self) -> int:
        """Pages of the tree that sequences hold."""
        return self.num_cached - self._tree.num_evictable if self._tree is not None else 0

    def counts(self) -> dict[str, float]:
        """For statistics; empty where nothing is cached."""
        if not self._caches:
            return {}
        return {
            "prefix_asked_tokens": self.num_asked_tokens,
            "prefix_found_tokens": self.num_found_tokens,
            "prefix_evicted_pages": self.num_evicted_pages,
            "prefix_pages": self.num_cached,
        }

    def admit(self, sequence: Sequence, num_pages: int, headroom: int = 0, *, must_compute: bool = True) -> None:
        """Gives a sequence without pages `num_pages` for its tokens, of which there must be as many free.

        must_compute: at least its last token is computed here, because the next one is drawn from it; else all of them may be resident.
        Sets `num_resident`: its leading tokens that are here already.
        """
        node = None
        if self._finds(sequence) and self._tree is not None and not (must_compute and sequence.wants_scores()):
            tokens = sequence.tokens[: len(sequence.tokens) - must_compute]
            node = self._tree.match(self._salt(sequence), tokens)
            self.num_asked_tokens += len(sequence.tokens)
        sequence.num_resident = 0
        if node is not None and self._tree is not None:
            self._tree.pin(node)
            sequence.prefix, sequence.num_shared_pages = node, node.depth
            for page in self._tree.pages(node):
                sequence.pages.append(Extent(page, 1))
            sequence.num_resident = node.depth * self._tree.page_size
            self.num_found_tokens += sequence.num_resident
        given = self.grow(sequence, num_pages - sequence.pages.num_pages, headroom)
        assert given, f"room {sequence.room} was let in for {num_pages} pages, {self.num_free} are free"

    def grow(self, sequence: Sequence, count: int, headroom: int = 0) -> bool:
        """`count` more own pages. False, and nothing changed, when so many are not to be had.

        Pages are evicted until these are found in one piece, the headroom behind them: what is evicted one after the other lay side by side in most
        cases, and a page at a time would scatter every answer over a pool that is full of cached pages. At most so many as are asked for here go.
        """
        if count > self.num_free:
            return False
        if self._tree is not None:
            most = max(count - self._allocator.num_free, count + headroom)
            while most > 0 and self._tree.num_evictable and not self._allocator.has_place(sequence.pages, count, headroom):
                evicted = self._tree.evict(min(EVICTED_AT_ONCE, most))
                most -= EVICTED_AT_ONCE
                self.num_evicted_pages += len(evicted)
                self._allocator.free_pages(evicted)
        return self._allocator.allocate(sequence.pages, count, headroom)

    def num_held(self, sequence: Sequence) -> int:
        """Of the pages that a sequence without any would be given, those that others hold anyway: they come out of nobody's free ones."""
        if self._tree is None or not self._finds(sequence):
            return 0
        node = self._tree.match(self._salt(sequence), sequence.tokens[:-1])
        while node is not None and not node.refs:
            node = node.parent
        return node.depth if node is not None else 0

    def _salt(self, sequence: Sequence) -> str:
        """Whose pages a sequence may find and be found by: without a cache, those of one prompt's answers alone, also of no equal prompt that came
        before, whose pages may still lie here."""
        request = sequence.request
        return request.cache_salt if self._caches else f"answers to {request.fork_of or request.room}"

    def _finds(self, sequence: Sequence) -> bool:
        return self._caches or bool(sequence.request.fork_of)

    def keep(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence's leading `num_tokens` are computed, and may be found by others from now on: their whole pages go to the tree. The sequence
        goes on holding them."""
        tree = self._tree
        if tree is None or not sequence.pages.num_pages:
            return
        if not self._caches:
            if not sequence.request.num_forks:
                return
            num_tokens = min(num_tokens, sequence.num_prompt)
        count = num_tokens // tree.page_size
        pages = [page for extent in sequence.pages.extents for page in range(extent.first, extent.end)][:count]
        sequence.prefix, taken = tree.extend(self._salt(sequence), sequence.prefix, sequence.tokens, pages)
        sequence.num_shared_pages += taken

    def release(self, sequence: Sequence) -> None:
        """Takes all of its pages; the tree's stay where they are, for whoever asks next."""
        tree, prefix = self._tree, sequence.prefix
        if tree is None or prefix is None:
            self._allocator.free(sequence.pages)
            return
        self._allocator.free(sequence.pages, kept=tree)
        sequence.prefix, sequence.num_shared_pages = None, 0
        self._allocator.free_pages(tree.unpin(prefix))

    def damaged(self, sequence: Sequence) -> None:
        """What was computed over its pages makes no sense: nobody shall find them again."""
        if self._tree is not None and sequence.prefix is not None:
            self._allocator.free_pages(self._tree.drop(sequence.prefix))

    def watch(self, watcher: PrefixWatcher) -> None:
        """Tells it which pages can be found again, now and from now on; nothing where nothing is cached."""
        if self._caches and self._tree is not None:
            self._tree.watch(watcher)

    def clear(self) -> None:
        """Gives back all pages of the tree that nobody holds."""
        if self._tree is not None:
            self._allocator.free_pages(self._tree.evict(len(self._tree)))
