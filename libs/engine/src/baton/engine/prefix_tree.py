"""Which pages hold the keys and values of which tokens, for as long as nobody needs the pages more. Pure: no memory is touched here."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

#: Stale entries of the heap that are put up with, beside as many as there are pages.
_SLACK = 64


class PrefixNode:
    """One whole page, behind the pages of the tokens before its own. refs: holders of this page or of one behind it.

    gone: it is out of the tree, so that nobody finds it any more; its page is given back when its last holder lets go.
    """

    __slots__ = ("children", "depth", "gone", "key", "last_used", "page", "parent", "refs")

    def __init__(self, parent: PrefixNode | None, key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, PrefixNode] = {}
        self.refs = 0
        self.last_used = 0
        self.gone = False


class PrefixWatcher(Protocol):
    """Hears what the tree holds, on the engine's thread; returns at once. A page is told behind the pages before it, and is gone before they are."""

    def stored(self, page: int, before: int | None, salt: bytes, tokens: bytes) -> None:
        """`page` can be found: it holds `tokens` (ids, uint32 in this machine's order) behind what page `before` ends; None: they are the first."""

    def gone(self, page: int) -> None:
        """Nobody finds `page` any more."""


class PrefixTree:
    """A radix tree whose edges are whole pages. It owns the pages that it was given until it gives them back.

    Each salt has a tree of its own: nobody finds what was put there under another. Keys are the bytes of the token ids, compared as a whole: equal
    hashes are no match, and Python keys its hash of bytes anew in each process, so that nobody can make prompts that collide.

    A holder pins the path from the root to its node; what is pinned is not evicted. Leaves go first, the one that was used least recently before
    all: what others share outlives what only one conversation had.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._roots: dict[bytes, PrefixNode] = {}
        self._owned: dict[int, PrefixNode] = {}
        self._clock = 0
        self._num_pushed = 0
        self._watcher: PrefixWatcher | None = None
        # (last use, order of pushing, node): leaves that nobody holds, and entries that are none any more.
        self._leaves: list[tuple[int, int, PrefixNode]] = []
        #: Pages that could be given back now.
        self.num_evictable = 0

    def __len__(self) -> int:
        """Pages that it owns."""
        return len(self._owned)

    def __contains__(self, page: object) -> bool:
        return page in self._owned

    def watch(self, watcher: PrefixWatcher) -> None:
        """Tells it all that is here, and from now on what changes."""
        self._watcher = watcher
        for salt, root in self._roots.items():
            line = list(root.children.values())
            while line:
                node = line.pop()
                line += node.children.values()
                self._tell(node, salt)

    def _tell(self, node: PrefixNode, salt: bytes) -> None:
        if self._watcher is not None:
            assert node.parent is not None
            self._watcher.stored(node.page, node.parent.page if node.parent.depth else None, salt, node.key)

    def match(self, salt: str, tokens: Sequence[int]) -> PrefixNode | None:
        """The node of the longest prefix of `tokens` in whole pages; None when not even the first page is there. It is not pinned by that."""
        node = self._roots.get(salt.encode())
        if node is None:
            return None
        for key in self._keys(tokens, 0, len(tokens) // self.page_size):
            child = node.children.get(key)
            if child is None:
                break
            node = child
        return node if node.depth else None

    def pages(self, node: PrefixNode) -> list[int]:
        """From the first page of the prefix to that of `node`."""
        found = [each.page for each in _upwards(node)]
        return found[::-1]

    def pin(self, node: PrefixNode) -> None:
        """Holds `node` and all before it, until `unpin`."""
        for each in _upwards(node):
            if not each.refs:
                self.num_evictable -= 1
            each.refs += 1

    def unpin(self, node: PrefixNode) -> list[int]:
        """Lets go. Returns the pages that belong to nobody any more: those of prefixes that were dropped meanwhile."""
        self._clock += 1
        freed: list[int] = []
        for each in _upwards(node):
            each.refs -= 1
            assert each.refs >= 0, f"page {each.page} was let go by more than held it"
            each.last_used = self._clock
            if each.refs:
                continue
            if each.gone:
                del self._owned[each.page]
                freed.append(each.page)
            else:
                self.num_evictable += 1
                self._push(each)
        return freed

    def extend(self, salt: str, node: PrefixNode | None, tokens: Sequence[int], pages: Sequence[int]) -> tuple[PrefixNode | None, int]:
        """The holder of `node` (None: of nothing yet) gives the pages of all of `tokens`, whole pages from the first one on; it holds the last one's
        node from now on. Returns that node, and how many of the pages the tree took: where it has a page of these tokens already, the holder keeps
        its own.

        A node that was dropped takes nothing.
        """
        if node is not None and node.gone:
            return node, 0
        start = node.depth if node is not None else 0
        if start >= len(pages):
            return node, 0
        place = node or self._root(salt.encode())
        taken = 0
        for index, key in enumerate(self._keys(tokens, start, len(pages)), start):
            child = place.children.get(key)
            if child is None:
                child = place.children[key] = PrefixNode(place, key, pages[index])
                assert pages[index] not in self._owned, f"page {pages[index]} is in the tree already"
                self._owned[pages[index]] = child
                taken += 1
                self._tell(child, salt.encode())
            elif not child.refs:
                self.num_evictable -= 1
            child.refs += 1
            place = child
        return place, taken

    def evict(self, count: int) -> list[int]:
        """Gives up to `count` pages back: of the leaves that nobody holds, the least recently used first."""
        evicted: list[int] = []
        while len(evicted) < count and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if not self._is_free_leaf(node) or node.last_used != last_used:
                continue
            assert node.parent is not None
            del self._owned[node.page]
            self._detach(node)
            self._told_gone(node)
            self.num_evictable -= 1
            evicted.append(node.page)
            if node.parent.depth:
                self._push(node.parent)
        return evicted

    def drop(self, node: PrefixNode) -> list[int]:
        """Nobody finds the prefix of `node` any more, nor anything that begins with its first page: some of it is damaged. Returns the pages that
        nobody holds; the others come back when they are let go."""
        if node.gone:
            return []
        *_, first = _upwards(node)
        self._detach(first)
        dropped = [first]
        for each in dropped:
            dropped += each.children.values()
        freed: list[int] = []
        for each in reversed(dropped):
            self._told_gone(each)
            if not each.refs:
                self.num_evictable -= 1
                del self._owned[each.page]
                freed.append(each.page)
        return freed

    def _told_gone(self, node: PrefixNode) -> None:
        node.gone = True
        if self._watcher is not None:
            self._watcher.gone(node.page)

    def _root(self, salt: bytes) -> PrefixNode:
        return self._roots.setdefault(salt, PrefixNode(None, salt, -1))

    def _detach(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if not parent.depth and not parent.children:
            del self._roots[parent.key]

    def _keys(self, tokens: Sequence[int], first: int, end: int) -> Iterator[bytes]:
        """The token ids of pages [first, end), as bytes."""
        size = self.page_size
        data = array("I", tokens[first * size : end * size]).tobytes()
        step = size * array("I").itemsize
        for start in range(0, len(data), step):
            yield data[start : start + step]

    @staticmethod
    def _is_free_leaf(node: PrefixNode) -> bool:
        return not (node.gone or node.refs or node.children)

    def _push(self, node: PrefixNode) -> None:
        if not self._is_free_leaf(node):
            return
        if len(self._leaves) > 2 * len(self._owned) + _SLACK:
            kept = (entry for entry in self._leaves if self._is_free_leaf(entry[2]) and entry[2].last_used == entry[0])
            self._leaves = list(kept)
            heapq.heapify(self._leaves)
        self._num_pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._num_pushed, node))


def _upwards(node: PrefixNode) -> Iterator[PrefixNode]:
    """From `node` to the first page of its prefix."""
    each: PrefixNode | None = node
    while each is not None and each.parent is not None:
        yield each
        each = each.parent
